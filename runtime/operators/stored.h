// Read stored weights: levels, scales and minimums of 16 columns, from arrays or from the blocks of
// GGUF files (ggml-common.h).
#pragma once
#include <algorithm>

#include "kernels.h"

namespace eesd {

// Types of stored weights. The first three types are those of Format; the last ten are blocks of
// GGUF files. export/cpu/panels.py lists them in the same order.
enum Stored : int64_t { FLOATS32, FLOATS16, BFLOATS16, INT8, UINT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
                        Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, STORED_TYPES };

// An array of values by input and output. Steps are the distances, in bytes, from one value to the
// next.
struct Array {
  const uint8_t *data;
  int64_t input_step, output_step;
};

// A stored weight. export/cpu/panels.py has the same members, and checks the shapes of arrays.
struct Source {
  int64_t type, inputs, outputs;
  int64_t groups;          // number of scales of an output, for levels in arrays
  int64_t planes;          // whether to put 8-bit levels into two planes if possible
  int64_t bytes;           // bytes of all blocks
  Array values;            // floats or levels; without steps, the blocks of one row after another
  Array scales, minimums;  // float32, for levels in arrays; minimums may be null
};

constexpr int64_t UNIT_INPUTS = SUPER * BLOCK;  // inputs that are read at once; fewer at the end
constexpr int64_t MOST_SHARED = 16;             // maximum number of scales of a column in a unit

struct Range {
  int least, most;
};

// A type of levels.
struct Kind {
  int64_t inputs, bytes;  // those of a block; in an array, those of a level
  bool fine, minimums;  // whether a block's scale is for 16 inputs; whether there are minimums
  Range levels;         // range of all possible levels
};
constexpr Kind KINDS[] = {
    {1, 1, false, false, {-128, 127}},   {1, 1, false, false, {0, 255}},
    {32, 18, false, false, {-8, 7}},     {32, 20, false, true, {0, 15}},
    {32, 22, false, false, {-16, 15}},   {32, 24, false, true, {0, 31}},
    {32, 34, false, false, {-128, 127}}, {256, 84, true, true, {0, 3}},
    {256, 110, true, false, {-4, 3}},    {256, 144, false, true, {0, 15}},
    {256, 176, false, true, {0, 31}},    {256, 210, true, false, {-32, 31}},
};
inline const Kind &kind_of(const Source &source) { return KINDS[source.type - INT8]; }

// Some inputs of the columns of a panel.
struct Unit {
  int64_t panel, columns, first, count;
};
using Levels = int16_t[PANEL][UNIT_INPUTS];

// Scales and minimums of a unit, column by column, and zeros after the last column.
struct Shared {
  float scales[PANEL][MOST_SHARED] = {}, minimums[PANEL][MOST_SHARED] = {};
};

template <typename Value>
Value load_at(const uint8_t *data, int64_t offset) {
  Value value;
  memcpy(&value, data + offset, sizeof value);
  return value;
}
inline float half_at(const uint8_t *data, int64_t offset) {
  return float_of(load_at<uint16_t>(data, offset));
}

// Call take(column, input, value) for the values of a unit.
template <typename Value, typename Take>
void read_array(const Array &array, const Unit &unit, const Take &take) {
  const uint8_t *from =
      array.data + unit.panel * PANEL * array.output_step + unit.first * array.input_step;
  const auto take_one = [&](int64_t c, int64_t k) {
    take(c, k, load_at<Value>(from, k * array.input_step + c * array.output_step));
  };
  if (array.output_step < array.input_step) {
    for (int64_t k = 0; k < unit.count; k++)
      for (int64_t c = 0; c < unit.columns; c++) take_one(c, k);
  } else {
    for (int64_t c = 0; c < unit.columns; c++)
      for (int64_t k = 0; k < unit.count; k++) take_one(c, k);
  }
}

// Add fields of BITS bits to levels. In each group of bytes, all fields in the lowest bits come
// first, then the fields in the next bits.
template <int GROUP, int BITS>
void add_fields(const uint8_t *data, int64_t bytes, int left, int16_t *levels) {
  for (int64_t at = 0; at < bytes; at += GROUP)
    for (int shift = 0; shift < 8; shift += BITS, levels += GROUP)
      for (int i = 0; i < GROUP; i++)
        levels[i] =
            static_cast<int16_t>(levels[i] + ((data[at + i] >> shift & ((1 << BITS) - 1)) << left));
}

// Read the levels of a block.
inline void read_block(int64_t type, const uint8_t *block, int16_t *levels) {
  const Kind &kind = KINDS[type - INT8];
  const int64_t rest = kind.minimums ? 4 : 2;  // in blocks of 32: bytes of scale and minimum
  std::fill_n(levels, kind.inputs, static_cast<int16_t>(type == Q8_0 ? 0 : kind.levels.least));
  switch (type) {
    case Q4_0:
    case Q4_1: return add_fields<16, 4>(block + rest, 16, 0, levels);
    case Q5_0:
    case Q5_1:
      return add_fields<16, 4>(block + rest + 4, 16, 0, levels),
             add_fields<1, 1>(block + rest, 4, 4, levels);
    case Q2_K: return add_fields<32, 2>(block + 16, 64, 0, levels);
    case Q3_K:
      return add_fields<32, 2>(block + 32, 64, 0, levels), add_fields<32, 1>(block, 32, 2, levels);
    case Q4_K: return add_fields<32, 4>(block + 16, 128, 0, levels);
    case Q5_K:
      return add_fields<32, 4>(block + 48, 128, 0, levels),
             add_fields<32, 1>(block + 16, 32, 4, levels);
    case Q6_K:
      return add_fields<64, 4>(block, 128, 0, levels),
             add_fields<32, 2>(block + 128, 64, 4, levels);
    default:  // Q8_0
      for (int64_t i = 0; i < 32; i++) levels[i] = load_at<int8_t>(block, 2 + i);
  }
}

// Read the scales of a block of 256, and its minimums if it has any.
inline void read_k_shared(int64_t type, const uint8_t *block, float *scales, float *minimums) {
  if (type == Q6_K) {
    for (int i = 0; i < 16; i++) scales[i] = half_at(block, 208) * load_at<int8_t>(block, 192 + i);
  } else if (type == Q3_K) {  // 6-bit scales, whose upper two bits are stored separately
    for (int i = 0; i < 16; i++) {
      const int integer =
          (block[96 + i % 8] >> i / 8 * 4 & 15) | (block[104 + i % 4] >> i / 4 * 2 & 3) << 4;
      scales[i] = half_at(block, 108) * static_cast<float>(integer - 32);
    }
  } else if (type == Q2_K) {
    for (int i = 0; i < 16; i++) {
      scales[i] = half_at(block, 80) * static_cast<float>(block[i] & 15);
      minimums[i] = -(half_at(block, 82) * static_cast<float>(block[i] >> 4));
    }
  } else {  // 6-bit scales; the upper two bits of the last four are stored separately
    const uint8_t *first = block + 4, *second = block + 8, *low = block + 12;
    for (int i = 0; i < 8; i++) {
      const int scale = i < 4 ? first[i] & 63 : (low[i - 4] & 15) | first[i - 4] >> 6 << 4;
      const int least = i < 4 ? second[i] & 63 : low[i - 4] >> 4 | second[i - 4] >> 6 << 4;
      scales[i] = half_at(block, 0) * static_cast<float>(scale);
      minimums[i] = -(half_at(block, 2) * static_cast<float>(least));
    }
  }
}

// Call work(column, block, place in the unit) for the blocks of a unit.
template <typename Work>
void each_block(const Source &source, const Unit &unit, const Work &work) {
  const Kind &kind = kind_of(source);
  for (int64_t c = 0; c < unit.columns; c++) {
    const int64_t row = unit.panel * PANEL + c;
    const uint8_t *block =
        source.values.data + (row * source.inputs + unit.first) / kind.inputs * kind.bytes;
    for (int64_t at = 0; at < unit.count; at += kind.inputs, block += kind.bytes)
      work(c, block, at);
  }
}

inline void read_levels(const Source &source, const Unit &unit, Levels &levels) {
  const auto take = [&](int64_t c, int64_t k, int16_t level) { levels[c][k] = level; };
  switch (source.type) {
    case INT8: return read_array<int8_t>(source.values, unit, take);
    case UINT8: return read_array<uint8_t>(source.values, unit, take);
    default:
      each_block(source, unit, [&](int64_t c, const uint8_t *block, int64_t at) {
        read_block(source.type, block, levels[c] + at);
      });
  }
}

// Read scales and minimums. A scale is for 16 inputs if the matrix is fine, and for 32 if not. A
// stored scale for more inputs is repeated.
inline void read_shared(const Source &source, const Matrix &matrix, const Unit &unit, Shared &to) {
  const int64_t size = matrix.fine ? 16 : BLOCK;
  if (source.type > UINT8) {
    return each_block(source, unit, [&](int64_t c, const uint8_t *block, int64_t at) {
      float *scales = to.scales[c] + at / size, *minimums = to.minimums[c] + at / size;
      if (kind_of(source).inputs == UNIT_INPUTS)
        return read_k_shared(source.type, block, scales, minimums);
      *scales = half_at(block, 0);
      if (matrix.minimums) *minimums = half_at(block, 2);
    });
  }
  for (int64_t r = 0; r < unit.count / size; r++) {
    const int64_t group = (unit.first + r * size) / (source.inputs / source.groups);
    const Unit row = {unit.panel, unit.columns, group, 1};
    read_array<float>(source.scales, row,
                      [&](int64_t c, int64_t, float scale) { to.scales[c][r] = scale; });
    if (matrix.minimums)
      read_array<float>(source.minimums, row,
                        [&](int64_t c, int64_t, float least) { to.minimums[c][r] = least; });
  }
}

}  // namespace eesd

extern "C" {

// Plan, on some threads, how to pack a weight: compute the 7 numbers that describe it, and its size
// in bytes. Returns null, or the reason why it cannot be packed.
EESD_EXPORT const char *eesd_plan(const eesd::Source *source, int64_t threads, int64_t *numbers);

// Pack a weight as planned by eesd_plan. Returns null, or the reason why it cannot be packed.
EESD_EXPORT const char *eesd_pack(const eesd::Source *source, int64_t threads,
                                  const int64_t *numbers, uint8_t *to);
}
