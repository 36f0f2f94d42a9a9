// Runs the kernels without ONNX Runtime over odd sizes, in buffers of just the size that they need: AddressSanitizer sees a byte
// that is read or written beside one. All kernels that this processor has must give the same bits; a checksum of them is printed, to
// compare with other machines, and on stderr their names. With an argument n, only each n-th case runs: an emulator is slow.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <memory>
#include <vector>

#include "kernels.h"

using namespace eesd;

static uint32_t state = 1;
static float noise() {
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)state * 0x1p-30f;
}

// Memory that ends where its last value ends. A vector may be longer.
template <typename T> struct Exact {
  std::unique_ptr<T[]> data;
  int64_t size;
  explicit Exact(int64_t count) : data(new T[count]()), size(count) {}
  T *get() { return data.get(); }
};
static void fill(Exact<float> &values) {
  for (int64_t i = 0; i < values.size; i++) values.get()[i] = noise();
}

static uint64_t checksum = 14695981039346656037u;  // FNV-1a of what the first kernels give
static void add(const void *data, int64_t size) {
  for (int64_t i = 0; i < size; i++) checksum = (checksum ^ static_cast<const uint8_t *>(data)[i]) * 1099511628211u;
}

static int stride = 1;
static bool left_out() {
  static int number = 0;
  return number++ % stride != 0;
}

static int failures = 0;
static void compare(const char *what, const char *kernel, Exact<float> &found, Exact<float> &expected) {
  if (memcmp(found.get(), expected.get(), found.size * 4)) printf("%s: %s gives other bits\n", what, kernel), failures++;
  for (int64_t i = 0; i < found.size; i++)
    if (!isfinite(found.get()[i])) {
      printf("%s: %s gives no number\n", what, kernel), failures++;
      break;
    }
}

static const Kernels *const every[] = {&scalar_kernels, &avx2_kernels, &avx2vnni_kernels, &avx512_kernels,
                                      &neon_kernels, &i8mm_kernels};

static void fill_weight(const Matrix &w, Exact<uint8_t> &data) {
  for (int64_t i = 0; i < data.size; i++) data.get()[i] = (uint8_t)(int32_t)(noise() * 128);
  if (!w.has_levels()) {
    for (int64_t i = 0; i < data.size; i += w.format == FLOAT32 ? 4 : 2) {
      const float value = noise();
      uint32_t bits;
      memcpy(&bits, &value, 4);
      const uint16_t narrow = w.format == BFLOAT16 ? bits >> 16 : 0x3000 | (bits & 0x83ff);
      memcpy(data.get() + i, w.format == FLOAT32 ? (void *)&bits : (void *)&narrow, w.format == FLOAT32 ? 4 : 2);
    }
    return;
  }
  const auto halves = [](uint8_t *p, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const uint16_t half = 0x2000 | ((int32_t)(noise() * 512) & 0x83ff);
      memcpy(p + 2 * i, &half, 2);
    }
  };
  const int64_t panels = w.panels(), behind = w.block_bytes() - w.level_bytes();
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t block = 0; block < w.inputs / BLOCK; block++) {
      uint8_t *p = data.get() + panel * w.panel_bytes(), *scales = p + w.blocks().at(block) + w.level_bytes();
      if (w.scales == SPLIT) halves(p + w.blocks().factors_at(block), w.factor_bytes() / 2);
      if (w.scales == NARROW) halves(scales, behind / 2);
      for (int64_t i = 0; w.scales == WIDE && i < behind; i += 4) {
        const float wide = noise() * 0.01f;
        memcpy(scales + i, &wide, 4);
      }
    }
}

static void check_product(Format format, bool fine, Scales scale, bool minimums, bool int8, int gating, int64_t rows, int64_t inputs,
                          int64_t outputs) {
  if (format >= PLANES && (fine || minimums)) return;
  if (left_out()) return;
  Matrix w = {nullptr, format, inputs, outputs, minimums || format < BITS4 ? 0 : 5, fine, scale, minimums};
  Exact<uint8_t> first(w.bytes()), second(w.bytes());
  fill_weight(w, first), fill_weight(w, second);
  Matrix parts[2] = {w, w};
  parts[0].data = first.get(), parts[1].data = second.get();
  const int64_t columns = outputs * (gating ? 1 : 2), blocks = w.has_levels() ? rows * inputs / BLOCK : 0;
  Exact<float> x(rows * inputs), norm(inputs), bias(2 * outputs), residual(rows * columns), expected(rows * columns);
  fill(x), fill(norm), fill(bias), fill(residual);
  for (const Kernels *kernels : every) {
    if (!kernels->supported()) continue;
    Exact<float> normed(rows * inputs), scales(blocks), shares(blocks), fine_shares(2 * blocks), y(rows * columns);
    Exact<int8_t> levels(w.has_levels() ? rows * inputs : 0);
    Exact<int32_t> sums(blocks), fine_sums(2 * blocks);
    Preparation ready = {};
    ready.x = x.get(), ready.norm = norm.get(), ready.epsilon = 1e-5f, ready.inputs = inputs;
    ready.int8 = int8 && w.has_levels(), ready.blocks = w.has_levels();
    ready.normed = normed.get(), ready.scales = scales.get(), ready.levels = levels.get();
    ready.shares[0] = shares.get(), ready.shares[1] = fine_shares.get();
    ready.sums[0] = sums.get(), ready.sums[1] = fine_sums.get();
    kernels->prepare(ready, 0, rows);
    Product job = {};
    job.parts = parts, job.num_parts = 2, job.gating = static_cast<Gating>(gating);
    job.a.x = normed.get(), job.a.levels = ready.int8 ? levels.get() : nullptr, job.a.scales = scales.get();
    for (int i = 0; i < 2; i++) job.a.sums[i] = ready.sums[i], job.a.shares[i] = ready.shares[i];
    job.bias = bias.get(), job.residual = residual.get(), job.y = y.get(), job.rows = rows, job.outputs = columns;
    const int64_t panels = w.panels() * (gating ? 1 : 2), middle = panels / 3;
    kernels->multiply(job, middle, panels);
    kernels->multiply(job, 0, middle);
    char what[160];
    snprintf(what, sizeof what, "format %d fine %d scales %d minimums %d int8 %d gating %d rows %d inputs %d outputs %d", format, fine,
             scale, minimums, int8, gating, (int)rows, (int)inputs, (int)outputs);
    if (kernels == every[0]) add(y.get(), y.size * 4), expected = std::move(y);
    else compare(what, kernels->name, y, expected);
  }
}

// A chain behind a context, then a tree in other slots with the same paths. With a rank, attention is latent.
static void check_attention(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t context, int64_t count,
                            Cells cells, float cap = 0, int64_t window = 0, int64_t rank = 0) {
  if (left_out()) return;
  const int64_t width = (head_dim + 15) / 16 * 16, slots = (context + 3 * count + 16) / 16 * 16, all = context + count;
  const int64_t columns = (heads + (rank ? 1 : 2) * kv_heads) * head_dim, values = rank ? rank : head_dim;
  const int64_t half = (head_dim - rank) / 2, part = rank ? (width / 2 + 15) / 16 * 16 : width;
  Exact<float> qkv(all * columns), cos(slots * half), sin(slots * half), norm(head_dim), expected(count * heads * values);
  fill(qkv), fill(cos), fill(sin), fill(norm);
  for (const Kernels *kernels : every) {
    if (!kernels->supported()) continue;
    for (int split = 0; split < 2; split++) {
      Exact<char> cache(2 * kv_heads * slots * (cells == LEVELS ? part + 4 : part * (cells == HALVES ? 2 : 4)) + 64);
      void *aligned = (void *)(((uintptr_t)cache.get() + 63) / 64 * 64);
      std::vector<Token> tokens;
      for (int64_t t = 0; t < all; t++) tokens.push_back({aligned, t, t, t + 1, nullptr, 0});
      Attention job = {};
      job.heads = heads, job.kv_heads = kv_heads, job.head_dim = head_dim, job.width = width, job.slots = slots;
      job.cache_heads = kv_heads, job.cache_width = part, job.writes = true;
      job.rank = rank, job.columns = columns, job.value_dim = values, job.value_width = (values + 15) / 16 * 16;
      job.cells = cells;
      job.cap = cap, job.window = window;
      job.scale = 0.2f, job.epsilon = 1e-5f, job.cos = cos.get(), job.sin = sin.get();
      job.q_norm = job.k_norm = rank ? nullptr : norm.get(), job.qkv = qkv.get(), job.tokens = tokens.data();
      const int64_t chunks = (all + CHUNK - 1) / CHUNK;
      job.chunks = split ? chunks : 1;
      Exact<float> q(all * heads * width), partial(all * heads * job.chunks * (2 + width)), y(all * heads * values);
      job.q = q.get(), job.partial = partial.get(), job.y = y.get();
      kernels->write(job, 0, all);
      for (int64_t first = 0; first < all; first += 16)
        for (int64_t kv = 0; kv < kv_heads; kv++)
          kernels->attend(job, first, first + 16 < all ? first + 16 : all, kv, 0, chunks);
      kernels->finish(job, 0, all);
      Exact<float> chain(count * heads * values), tree(count * heads * values);
      memcpy(chain.get(), y.get() + context * heads * values, chain.size * 4);
      std::vector<std::vector<int32_t>> paths;  // the same chain in every second slot from the last one down
      for (int64_t t = 0; t < count; t++) {
        paths.emplace_back();
        for (int64_t i = 0; i <= t; i++) paths.back().push_back((int32_t)(slots - 1 - 2 * i));
      }
      for (int64_t t = 0; t < count; t++)
        tokens[(size_t)t] = {aligned, context + t, slots - 1 - 2 * t, context, paths[(size_t)t].data(), t + 1};
      job.qkv = qkv.get() + context * columns, job.y = tree.get();
      kernels->write(job, 0, count);
      for (int64_t kv = 0; kv < kv_heads; kv++) kernels->attend(job, 0, count, kv, 0, chunks);
      kernels->finish(job, 0, count);
      char what[120];
      snprintf(what, sizeof what, "attention %d/%d heads of %d, context %d, %d tokens, split %d, cells %d", (int)heads,
               (int)kv_heads, (int)head_dim, (int)context, (int)count, split, cells);
      if (kernels == every[0] && !split) add(chain.get(), chain.size * 4), expected = std::move(chain);
      else compare(what, kernels->name, chain, expected);
      compare(what, "a tree", tree, expected);
    }
  }
}

static void check_top(int64_t rows, int64_t columns, int64_t k) {
  if (left_out()) return;
  Exact<float> logits(rows * columns), expected(rows * k);
  Exact<int64_t> columns_expected(rows * k);
  fill(logits);
  for (int64_t i = 0; i < logits.size; i += 3) logits.get()[i] = 0.5f;  // ties
  for (const Kernels *kernels : every) {
    if (!kernels->supported()) continue;
    Exact<float> logprobs(rows * k);
    Exact<int64_t> found(rows * k);
    const int64_t middle = rows / 2;
    const TopK job = {logits.get(), columns, k, found.get(), logprobs.get()};
    kernels->top(job, middle, rows);
    kernels->top(job, 0, middle);
    char what[80];
    snprintf(what, sizeof what, "%d of %d columns, %d rows", (int)k, (int)columns, (int)rows);
    if (kernels == every[0]) {
      add(logprobs.get(), rows * k * 4), add(found.get(), rows * k * 8);
      expected = std::move(logprobs), columns_expected = std::move(found);
      continue;
    }
    compare(what, kernels->name, logprobs, expected);
    if (memcmp(found.get(), columns_expected.get(), rows * k * 8)) printf("%s: %s finds others\n", what, kernels->name), failures++;
  }
}

// Which experts rows use, and the sum of what these give.
static void check_experts(int64_t rows, int64_t experts, int64_t used, int64_t width, bool normed, bool scored = false) {
  if (left_out()) return;
  Exact<float> logits(rows * experts), given(rows * used * width), residual(rows * width), expected(rows * width);
  fill(logits), fill(given), fill(residual);
  for (const Kernels *kernels : every) {
    if (!kernels->supported()) continue;
    Exact<float> weights(rows * used), y(rows * width);
    Exact<int64_t> found(rows * used), places(rows * used);
    for (int64_t i = 0; i < places.size; i++) places.get()[i] = places.size - 1 - i;
    Exact<float> memory(rows * 4 * experts);
    Exact<int64_t> columns(rows * experts);
    const bool grouped = scored && experts % 2 == 0 && used <= experts / 2;
    const Routing routing = {{logits.get(), experts, used, found.get(), weights.get()},
                             normed,
                             normed ? nullptr : logits.get(),
                             scored ? (normed ? SIGMOID : SOFTMAX) : (normed ? SPARSEMIXER : SOFTMAX),
                             scored ? logits.get() : nullptr,
                             grouped ? 2 : 1,
                             1,
                             1,
                             1e-3f,
                             normed ? 2.5f : 1,
                             0.02f,
                             memory.get(),
                             columns.get()};
    const Combination job = {given.get(), weights.get(), places.get(), used, width, normed ? residual.get() : nullptr, y.get()};
    kernels->route(routing, rows / 2, rows);
    kernels->route(routing, 0, rows / 2);
    kernels->combine(job, rows / 2, rows);
    kernels->combine(job, 0, rows / 2);
    char what[80];
    snprintf(what, sizeof what, "%d of %d experts, %d rows of %d", (int)used, (int)experts, (int)rows, (int)width);
    if (kernels == every[0]) add(y.get(), y.size * 4), expected = std::move(y);
    else compare(what, kernels->name, y, expected);
  }
}

// Tokens of the delta rule, or of a state space, that follow each other, in two calls; then the state of all of them again, from their records.
static void check_delta(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t taps, bool space) {
  if (left_out()) return;
  const int64_t count = 5, first = 2;
  DeltaRule job = {key_heads, value_heads, key_dim, value_dim, taps, space, (value_dim + 15) / 16 * 16, 1e-5f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  Exact<float> weights(taps * job.mixed()), decay(value_heads), bias(value_heads), norm(value_dim), x(count * job.columns());
  Exact<float> expected(count * job.values()), skip(value_heads), taps_bias(job.mixed());
  fill(weights), fill(decay), fill(bias), fill(norm), fill(x), fill(skip), fill(taps_bias);
  for (const Kernels *kernels : every) {
    if (!kernels->supported()) continue;
    Exact<float> records(count * job.record_size()), convolved(count * job.mixed()), y(count * job.values());
    Exact<float> state(value_heads * job.state_size()), again(value_heads * job.state_size());
    std::vector<float *> own;
    std::vector<const float *> before;
    for (int64_t t = 0; t < count; t++) {
      own.push_back(records.get() + t * job.record_size());
      for (int64_t distance = 1; distance < taps; distance++)
        before.push_back(distance <= t ? x.get() + (t - distance) * job.columns() : nullptr);
    }
    job.weights = weights.get(), job.decay = decay.get(), job.bias = bias.get(), job.norm = norm.get(), job.x = x.get();
    if (space) job.skip = skip.get(), job.taps_bias = taps_bias.get();
    job.records = own.data(), job.before = before.data(), job.convolved = convolved.get(), job.y = y.get();
    kernels->mix(job, first, count);
    kernels->mix(job, 0, first);
    for (int64_t h = 0; h < value_heads; h++) {
      float *to = state.get() + h * job.state_size(), *other = again.get() + h * job.state_size();
      kernels->step(job, 0, own[0], job.record_size(), first, h, to, to);
      kernels->step(job, first, own[first], job.record_size(), count - first, h, to, to);
      kernels->step(job, -1, own[0], job.record_size(), count, h, other, other);
    }
    char what[80];
    snprintf(what, sizeof what, "delta rule, %d and %d heads of %d, %d", (int)key_heads, (int)value_heads, (int)key_dim, (int)value_dim);
    compare(what, "a replay", again, state);
    if (kernels == every[0]) add(y.get(), y.size * 4), expected = std::move(y);
    else compare(what, kernels->name, y, expected);
  }
}

int main(int count, char **arguments) {
  if (count > 1) stride = atoi(arguments[1]);
  for (const Kernels *kernels : every)
    if (kernels->supported()) fprintf(stderr, "%s\n", kernels->name);
  const int64_t sizes[][3] = {{1, 32, 1}, {2, 96, 49}, {5, 64, 16}, {9, 32, 33}, {17, 64, 80}, {70, 32, 20}};
  for (int format = FLOAT32; format <= UPPER; format++)
    for (int variant = 0; variant < (format < BITS4 ? 1 : 16); variant++)
      for (const auto &size : sizes)
        for (int gating = APART; gating <= GELU; gating++)
          check_product((Format)format, variant & 1, variant & 2 ? WIDE : NARROW, variant & 4, variant & 8, gating, size[0],
                        size[1], size[2]);
  for (int format = BITS4; format <= UPPER; format++)
    for (int variant = 0; variant < 8; variant++)
      for (int64_t inputs : {256, 512})
        check_product((Format)format, variant & 1, SPLIT, variant & 2, variant & 4, 0, 7, inputs, 33);
  for (int64_t inputs : {1, 20, 33})
    for (int format = FLOAT32; format <= BFLOAT16; format++) check_product((Format)format, 0, NARROW, 0, 0, 0, 3, inputs, 17);
  const int64_t shapes[][3] = {{2, 1, 8}, {3, 3, 20}, {4, 2, 64}, {2, 2, 80}, {5, 1, 128}, {40, 1, 2}, {1, 1, 256}};
  for (const auto &shape : shapes)
    for (int64_t context : {0, 1, 15, 16, 63, 65, 127, 129, 200})
      for (int64_t count : {1, 5, 18})
        check_attention(shape[0], shape[1], shape[2], context, count, (Cells)((context + count) % 3));
  for (int64_t context : {5, 127, 200}) check_attention(3, 1, 26, context, 5, context % 2 ? HALVES : FLOATS, 0, 0, 20);
  for (int64_t context : {5, 127, 200}) check_attention(4, 2, 64, context, 5, context % 2 ? LEVELS : FLOATS, 2.f, 100);
  for (int64_t columns : {1, 15, 64, 65, 200, 1000})
    for (int64_t k : {1, 4, 8, 70})
      if (k <= columns) check_top(3, columns, k);
  for (int64_t columns : {1, 16, 33})
    for (int64_t experts : {1, 8, 17, 130}) for (bool scored : {false, true}) check_experts(3, experts, (experts + 6) / 7, columns, columns % 2, scored);
  for (const bool space : {false, true}) {
    check_delta(1, 1, 1, 1, 1, space), check_delta(1, 3, 5, 16, 4, space);
    check_delta(2, 4, 20, 33, 3, space), check_delta(2, 2, 33, 130, 2, space);
  }
  if (!failures) printf("equal bits, %016llx\n", (unsigned long long)checksum);
  return failures != 0;
}
