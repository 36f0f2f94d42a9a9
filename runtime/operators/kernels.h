// The interface of the kernels. There is a set of kernels for each instruction set. All sets give the same bits, because the order of
// each sum does not depend on the number of rows, on threads or on the width of registers (SPECIFICATION.md).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef _WIN32
#define EESD_EXPORT __declspec(dllexport)
#else
#define EESD_EXPORT __attribute__((visibility("default")))
#endif

namespace eesd {

constexpr int64_t PANEL = 16;  // columns of a weight that are stored side by side
constexpr int64_t BLOCK = 32;  // inputs that share a scale, of weights and of activations
constexpr int64_t SUPER = 8;   // blocks whose split scales share a factor
constexpr int64_t HALF = 256;  // bytes of the upper or the lower 4 bits of a block
constexpr int64_t CHUNK = 128; // positions whose softmax is computed at once
constexpr int64_t MAX_HEAD = 512;   // maximum width of a head
constexpr int64_t MAX_WIDTH = 576;  // maximum width of a row of latent attention

// PLANES: 8-bit levels, whose lower halves follow after all panels. UPPER: the same bytes, but the lower halves are not read.
enum Format { FLOAT32, FLOAT16, BFLOAT16, BITS4, BITS5, BITS6, BITS8, PLANES, UPPER };
enum Scales { NARROW, WIDE, SPLIT };  // float16; float32; int8 times a float16 for 256 inputs

// Offsets, within a panel, of a block and of the factors of its scales.
struct Blocks {
  int64_t bytes, factor_bytes;
  [[gnu::always_inline]] int64_t at(int64_t block) const { return block * bytes + (block / SUPER + 1) * factor_bytes; }
  [[gnu::always_inline]] int64_t factors_at(int64_t block) const { return block / SUPER * (SUPER * bytes + factor_bytes); }
};

// A weight [inputs, outputs] in panels of 16 columns. With levels, a block of a panel holds 32 inputs, then scales, then minimums.
// With split scales, each 8 blocks are preceded by the factors of their scales, and then the factors of their minimums.
struct Matrix {
  const uint8_t *data;
  Format format;
  int64_t inputs, outputs;
  int32_t zero;      // the level that stands for 0; 0 if there are minimums
  bool fine;         // whether a scale is for 16 inputs, not 32
  Scales scales;     // type of scales and minimums
  bool minimums;

  // These functions are always inlined. Of a function that is not inlined, the linker keeps one copy, perhaps the copy compiled for
  // AVX-512.
  [[gnu::always_inline]] bool has_levels() const { return format >= BITS4; }
  [[gnu::always_inline]] bool has_planes() const { return format >= PLANES; }
  [[gnu::always_inline]] int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
  [[gnu::always_inline]] bool same_kind(const Matrix &other) const {
    return format == other.format && zero == other.zero && fine == other.fine && scales == other.scales && minimums == other.minimums;
  }
  [[gnu::always_inline]] int64_t level_bytes() const {
    return format == BITS5 ? 320 : format == BITS6 ? 384 : format == BITS8 ? 512 : HALF;
  }
  [[gnu::always_inline]] int64_t factor_bytes() const { return scales == SPLIT ? PANEL * 2 * (minimums ? 2 : 1) : 0; }
  [[gnu::always_inline]] int64_t block_bytes() const {
    return level_bytes() + PANEL * (scales == WIDE ? 4 : scales == NARROW ? 2 : 1) * (fine ? 2 : 1) * (minimums ? 2 : 1);
  }
  [[gnu::always_inline]] int64_t panel_bytes() const {
    if (!has_levels()) return inputs * PANEL * (format == FLOAT32 ? 4 : 2);
    return inputs / BLOCK * block_bytes() + inputs / BLOCK / SUPER * factor_bytes();
  }
  // The offset of a panel's lower plane, if there are two planes; and the size of the weight in bytes.
  [[gnu::always_inline]] int64_t lower_at(int64_t panel) const { return panels() * panel_bytes() + panel * (inputs / BLOCK) * HALF; }
  [[gnu::always_inline]] int64_t bytes() const { return lower_at(has_planes() ? panels() : 0); }
  [[gnu::always_inline]] Blocks blocks() const { return {block_bytes(), factor_bytes()}; }
};

// A float16 as float32.
static inline float float_of(uint16_t half) {
  uint32_t sign = (uint32_t)(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023, bits;
  float value;
  if (exponent == 0) {  // zero or subnormal: a multiple of 2^-24
    value = (float)fraction * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  }
  memcpy(&value, &bits, 4);
  return value;
}

// The float16 nearest to a finite float32, ties to even. Values out of range become the largest or the most negative float16.
static inline uint16_t half_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x477fe000) return sign | 0x7bff;  // more than 65504
  if (bits < 0x38800000) {                      // less than 2^-14: adding 1/2 rounds to a multiple of 2^-24
    float size;
    memcpy(&size, &bits, 4);
    size += 0.5f;
    memcpy(&bits, &size, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// The activations of some rows, in the form that products read. Index 0 of sums and shares is for blocks of 32 inputs, index 1 for
// halves.
struct Activations {
  const float *x;          // [rows, inputs]
  const int8_t *levels;    // [rows, inputs]; null if products use x
  const float *scales;     // [rows, inputs / 32]
  const int32_t *sums[2];  // of levels, [rows, inputs / 32 or 16]
  const float *shares[2];  // factors of minimums: sums of x, or scale times sum of levels
  bool whole_blocks;       // whether one row fetches whole blocks of levels ahead (fetching.h)
};

// Rows to prepare. The rows are normalized if there is a norm. Then, if requested, they are rounded to 8 bits or summed, in blocks.
struct Preparation {
  const float *x, *norm;  // [rows, inputs], [inputs] or null
  float epsilon;
  int64_t inputs;
  bool int8, blocks;
  float *normed, *scales, *shares[2];
  int8_t *levels;
  int32_t *sums[2];
};

// Activation of a gate g and an up part u, which are side by side: g / (1 + exp(-g)) u, the same with the tanh approximation of GELU, or
// with g and u limited, as in gpt-oss.
enum Gating : int { APART, SILU, GELU, CLAMPED };

// y = x W + bias + residual; for a gate and an up part, silu(x gate) (x up), or the same with gelu.
struct Product {
  const Matrix *parts;
  int64_t num_parts;
  Gating gating;
  Activations a;
  const float *bias, *residual;  // [outputs], [rows, outputs]; or null
  float *y;
  int64_t rows, outputs;
};

// A token of a call. It has a slot, and sees the slots before `context` and then those of its path.
struct Token {
  void *cache;
  int64_t position, slot, context;
  const int32_t *path;
  int64_t path_length;
  int64_t seen() const { return context + path_length; }
};

// Types of cache cells: float32, float16, or 8-bit levels with a scale for each row of a head.
enum Cells : int { FLOATS, HALVES, LEVELS };

// Call work(cell) with a cell of the caches' type.
template <typename Work> static inline void with_cells(Cells cells, const Work &work) {
  if (cells == FLOATS) work(float());
  else if (cells == HALVES) work(uint16_t());
  else work(int8_t());
}

// A tile holds the cells of 16 slots; levels are followed by the slots' scales in float32. Keys are [width / p, 16, p], values [16 / p,
// width, p]. For levels p is 2, so that two numbers that one instruction multiplies are neighbours; for other cells p is 1.
template <typename Cell> constexpr int64_t PAIR = sizeof(Cell) == 1 ? 2 : 1;
template <typename Cell> static inline int64_t tile_of(int64_t width) { return 16 * width + (sizeof(Cell) == 1 ? 64 : 0); }
template <typename Cell> static inline int64_t key_at(int64_t slot, int64_t d) {
  return (d / PAIR<Cell> * 16 + slot % 16) * PAIR<Cell> + d % PAIR<Cell>;
}
template <typename Cell> static inline int64_t value_at(int64_t slot, int64_t d, int64_t width) {
  return (slot % 16 / PAIR<Cell> * width + d) * PAIR<Cell> + slot % PAIR<Cell>;
}
template <typename Cell> static inline float *scales_of(Cell *tile, int64_t width) { return (float *)(tile + 16 * width); }

// One layer's attention. Caches are [layers, 2, kv_heads, slots / 16] tiles. Each tile holds the keys or values of 16 slots.
struct Attention {
  const Token *tokens;
  int64_t heads, kv_heads, head_dim, width, slots, layer;  // width: head_dim, rounded up to a multiple of 16
  int64_t rank, value_dim, value_width;  // with a rank, keys are rows whose first `rank` numbers are the values, and the rest is rotated
  int64_t cache_heads, cache_width;                        // those of each layer's part of a cache
  bool writes;                                             // whether there are keys and values, which are written
  Cells cells;
  bool hides_first;                                        // whether only the first token of a text sees slot 0
  bool norms_last;                                         // whether heads are normalized after rotation
  float scale, cap, epsilon;                               // cap: limit of scores; 0 for none
  int64_t window;                                          // number of positions that a token sees; 0 for all
  const float *cos, *sin, *q_norm, *k_norm;  // [S, half of the rotated size], or null if heads are not rotated; [head_dim] or null
  const float *sinks;                        // [heads], a further score of each head, whose value is 0; or null
  const float *qkv;                          // [tokens, columns]: queries, keys and values, as in operators.cpp
  int64_t columns;
  float *q;                                  // [tokens, heads, width]; in another form for caches of levels, see write_query
  float *partial;                            // [tokens, heads, chunks, 2 + width]: maximum, sum, weighted values
  int64_t chunks;                            // 1 if a unit of work covers all chunks of its tokens
  float *y;                                  // [tokens, heads value_dim]

  template <typename Cell> Cell *keys(const Token &t, int64_t kv) const {
    return part_of<Cell>(t, 0) + kv * (slots / 16) * tile_of<Cell>(width);
  }
  template <typename Cell> Cell *values(const Token &t, int64_t kv) const {
    return part_of<Cell>(t, rank ? 0 : 1) + kv * (slots / 16) * tile_of<Cell>(width);
  }
  // The keys (0) or values (1) of the layer.
  template <typename Cell> Cell *part_of(const Token &t, int64_t part) const {
    return static_cast<Cell *>(t.cache) + (layer * 2 + part) * cache_heads * (slots / 16) * tile_of<Cell>(cache_width);
  }
  float *part(int64_t token, int64_t head, int64_t chunk) const {
    return partial + ((token * heads + head) * chunks + chunk) * (2 + width);
  }
};

// The k largest values of each row of logits.
struct TopK {
  const float *logits;  // [rows, columns]
  int64_t columns, k;
  int64_t *found;   // [rows, k]: columns
  float *logprobs;  // [rows, k]
};

enum Scores { SOFTMAX, SIGMOID, SPARSEMIXER };

// The experts of each row, and their weights.
struct Routing {
  TopK top;
  bool normed;           // whether the weights are divided by their sum
  const float *factors;  // [columns]: factors of the weights, or null
  Scores scores;
  const float *bias;  // [columns]: added to the scores by which experts are chosen, or null
  int64_t groups, used_groups, group_best;
  float epsilon, scale, margin;
  float *memory;     // [rows, 4 columns], unless experts are chosen by their logits
  int64_t *columns;  // [rows, columns], if there are groups

  [[gnu::always_inline]] bool by_logits() const { return scores == SPARSEMIXER || (scores == SOFTMAX && !bias && groups == 1); }
};

// The weighted sum of the results of a token's experts, in ascending order of the experts.
struct Combination {
  const float *experts;     // [rows used, columns]
  const float *weights;     // [rows, used]
  const int64_t *rows;      // [rows, used]: rows of `experts`
  int64_t used, columns;
  const float *residual;    // [rows, columns] or null
  float *y;
};

// Tokens of the gated delta rule or of a state space. A token's cache slot has a record: the inputs of the convolution, keys, deltas, and
// the logarithms of decays. The state of a head is [key_dim, width].
constexpr float DELTA_EPSILON = 1e-6f;
struct DeltaRule {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  bool space;     // whether it is a state space
  int64_t width;  // value_dim, rounded up to a multiple of 16
  float epsilon;
  const float *weights, *decay, *bias, *norm;  // [taps, mixed], [value_heads] twice, [value_dim]; a state space has no norm
  const float *skip, *taps_bias;               // [value_heads] of a state space, [mixed] or null
  const float *x;                              // [tokens, columns]: mixed, gates, rates unless it is a state space, decays
  float *const *records;                       // [tokens]
  const float *const *before;                  // [tokens, taps - 1]: inputs of earlier tokens, the latest first; null if there is none
  float *convolved;                            // [tokens, mixed]
  float *y;                                    // [tokens, values]

  [[gnu::always_inline]] int64_t keys() const { return key_heads * key_dim; }
  [[gnu::always_inline]] int64_t values() const { return value_heads * value_dim; }
  [[gnu::always_inline]] int64_t mixed() const { return 2 * keys() + values(); }
  [[gnu::always_inline]] int64_t columns() const { return mixed() + values() + (space ? 1 : 2) * value_heads; }
  [[gnu::always_inline]] int64_t record_size() const { return mixed() + keys() + values() + value_heads; }
  [[gnu::always_inline]] int64_t state_size() const { return key_dim * width; }
};

struct Kernels {
  const char *name;
  bool (*supported)();
  void (*prepare)(const Preparation &, int64_t first_row, int64_t last_row);
  void (*multiply)(const Product &, int64_t first_panel, int64_t last_panel);
  void (*write)(const Attention &, int64_t first_token, int64_t last_token);  // rotates queries and keys, and writes the cache
  void (*attend)(const Attention &, int64_t first_token, int64_t last_token, int64_t kv, int64_t first_chunk, int64_t last_chunk);
  void (*finish)(const Attention &, int64_t first_token, int64_t last_token);  // computes y from the parts of all chunks
  void (*top)(const TopK &, int64_t first_row, int64_t last_row);
  void (*route)(const Routing &, int64_t first_row, int64_t last_row);
  void (*combine)(const Combination &, int64_t first_row, int64_t last_row);
  void (*mix)(const DeltaRule &, int64_t first_token, int64_t last_token);
  void (*step)(const DeltaRule &, int64_t token, float *record, int64_t stride, int64_t count, int64_t head, const float *from, float *to);
};

extern const Kernels avx512_kernels, avx2vnni_kernels, avx2_kernels, i8mm_kernels, neon_kernels, scalar_kernels;

}  // namespace eesd
