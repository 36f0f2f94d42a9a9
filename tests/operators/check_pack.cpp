// Packs weights of all types and odd sizes, from memory and into memory of just the size that they
// need, under sanitizers. Bytes are compared in test_pack.py; here sizes are checked.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "stored.h"

using namespace eesd;

static uint32_t state = 1;
static uint32_t noise() { return (state = state * 1664525u + 1013904223u) >> 8; }

static int failures = 0;
static void expect(bool right, const char *what, int64_t type) {
  if (!right) printf("type %d: %s\n", static_cast<int>(type), what), failures++;
}

// Memory that ends where its last byte ends.
struct Bytes {
  std::unique_ptr<uint8_t[]> data;
  int64_t size;
  explicit Bytes(int64_t count) : data(new uint8_t[static_cast<size_t>(count)]), size(count) {
    for (int64_t i = 0; i < count; i++) data[static_cast<size_t>(i)] = static_cast<uint8_t>(noise());
  }
  Array array(int64_t inputs, int64_t outputs, bool across) const {
    const int64_t value = size / (inputs * outputs);
    return {data.get(), across ? value * outputs : value, across ? value : value * inputs};
  }
};

static void fill_floats(Bytes &bytes, float unit) {
  for (int64_t i = 0; i < bytes.size; i += 4) {
    const float value = unit * static_cast<float>(static_cast<int>(noise() % 255) - 127);
    memcpy(bytes.data.get() + i, &value, 4);
  }
}

// A weight has no such size.
static void check_refusals(const Source &source) {
  std::vector<Source> others(5, source);
  others[0].inputs = 0, others[1].outputs = int64_t{1} << 40, others[2].inputs = INT64_MIN;
  others[3].outputs = -1, others[4].inputs = int64_t{1} << 28;
  if (source.type >= INT8) others.push_back(source), others.back().inputs++;
  if (source.type >= Q4_0) others.push_back(source), others.back().bytes--;
  int64_t found[8];
  for (const Source &other : others)
    expect(eesd_plan(&other, 2, found), "a wrong source is taken", source.type);
}

static void check_pack(const Source &source) {
  for (int64_t threads : {1, 3}) {
    int64_t numbers[8];
    const char *why = eesd_plan(&source, threads, numbers);
    expect(!why, why ? why : "", source.type);
    if (why) return;
    Bytes packed(numbers[7]);
    why = eesd_pack(&source, threads, numbers, packed.data.get());
    expect(!why, why ? why : "", source.type);
    check_refusals(source);
  }
}

static void check_floats(int64_t type, int64_t inputs, int64_t outputs) {
  const Bytes values(inputs * outputs * (type == FLOATS32 ? 4 : 2));
  for (bool across : {false, true}) {
    Source source = {};
    source.type = type, source.inputs = inputs, source.outputs = outputs;
    source.values = values.array(inputs, outputs, across);
    check_pack(source);
  }
}

static void check_levels(int64_t type, int64_t inputs, int64_t outputs, int64_t block, float unit) {
  Bytes levels(inputs * outputs), scales(inputs / block * outputs * 4);
  fill_floats(scales, unit);
  for (int variant = 0; variant < 8; variant++) {
    if (variant & 4 && type == INT8) continue;
    Source source = {};
    source.type = type, source.inputs = inputs, source.outputs = outputs;
    source.groups = inputs / block, source.planes = variant & 1;
    source.values = levels.array(inputs, outputs, variant & 2);
    source.scales = scales.array(source.groups, outputs, !(variant & 2));
    if (variant & 4) source.minimums = source.scales;
    check_pack(source);
  }
}

static void check_blocks(int64_t type, int64_t inputs, int64_t rows, int64_t row_bytes) {
  Bytes blocks(rows * row_bytes);
  for (int64_t i = 0; i < blocks.size; i++) blocks.data[static_cast<size_t>(i)] &= 0xbb;  // finite
  Source source = {};
  source.type = type, source.inputs = inputs, source.outputs = rows, source.bytes = blocks.size;
  source.values.data = blocks.data.get();
  check_pack(source);
}

int main() {
  const int64_t sizes[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210};
  for (int64_t outputs : {1, 15, 16, 17, 70}) {
    for (int64_t type = FLOATS32; type <= BFLOATS16; type++)
      for (int64_t inputs : {1, 33, 257}) check_floats(type, inputs, outputs);
    for (int64_t type = INT8; type <= UINT8; type++)
      for (int64_t block : {16, 32, 64})
        for (int64_t inputs : {64, 320, 512})
          for (float unit : {0x1p-6f, 0.0123f * 0x1p-9f, 1e-30f})
            check_levels(type, inputs, outputs, block, unit);
    for (int64_t type = Q4_0; type <= Q6_K; type++) {
      const int64_t inputs = type < Q2_K ? 288 : 512, block = type < Q2_K ? 32 : 256;
      check_blocks(type, inputs, outputs, inputs / block * sizes[type - Q4_0]);
    }
  }
  if (!failures) printf("packed\n");
  return failures != 0;
}
