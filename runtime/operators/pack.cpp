// Pack stored weights into panels, some panels on each thread. A weight is read twice, because its
// values determine its format.
#include "stored.h"

#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

namespace eesd {
namespace {

constexpr int64_t LIMIT = 1 << 28;  // upper limit of sizes, beyond those of any model
constexpr int64_t TOGETHER = 4;     // panels whose values share the lines of a processor's cache

const char *check_array_levels(const Source &s) {
  if (s.groups < 1 || s.inputs % s.groups) return "the scales do not fit the inputs";
  const int64_t block = s.inputs / s.groups;
  if (block != 16 && block % BLOCK) return "a scale is for 16 inputs or a multiple of 32";
  return nullptr;
}

const char *check_blocks(const Source &s) {
  const Kind &kind = kind_of(s);
  if (s.inputs % kind.inputs) return "the inputs are no whole blocks";
  const int64_t row = s.inputs / kind.inputs * kind.bytes;
  return s.bytes == s.outputs * row ? nullptr : "the blocks have another size";
}

const char *check(const Source &s) {
  if (s.inputs < 1 || s.inputs >= LIMIT || s.outputs < 1 || s.outputs >= LIMIT)
    return "a weight has no such size";
  if (s.type <= BFLOATS16) return nullptr;
  if (s.inputs % BLOCK) return "levels need a multiple of 32 inputs";
  return s.type <= UINT8 ? check_array_levels(s) : check_blocks(s);
}

// Call work(unit) for all units, on some threads. `work` must not throw.
template <typename Work>
void each_unit(const Matrix &matrix, int64_t threads, const Work &work) {
  const int64_t panels = matrix.panels(), parts = (panels + TOGETHER - 1) / TOGETHER;
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t part; (part = next++) < parts;)
      for (int64_t first = 0; first < matrix.inputs; first += UNIT_INPUTS)
        for (int64_t p = part * TOGETHER; p < std::min((part + 1) * TOGETHER, panels); p++)
          work(Unit{p, std::min(PANEL, matrix.outputs - p * PANEL), first,
                    std::min(UNIT_INPUTS, matrix.inputs - first)});
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min(threads, parts); i++) others.emplace_back(run);
  } catch (...) {  // go on with fewer threads
  }
  run();
  for (std::thread &other : others) other.join();
}

constexpr struct {
  Format format;
  int levels;
} FORMATS[] = {{BITS4, 16}, {BITS5, 32}, {BITS6, 64}, {BITS8, 256}, {PLANES, 256}};

// The narrowest format that holds these levels, and the number to add to them.
void find_format(Range levels, Matrix &matrix) {
  for (const auto &one : FORMATS) {
    matrix.format = one.format;
    matrix.zero = levels.least < 0 ? one.levels / 2 : 0;
    if (levels.least + matrix.zero >= 0 && levels.most + matrix.zero < one.levels) return;
  }
}

bool are_levels(int bits, Format format) {
  for (const auto &one : FORMATS)
    if (one.format == format) return (bits & ~(one.levels - 1)) == 0;
  return false;
}

bool is_float16(float value) { return float_of(half_of(value)) == value; }

// Find integers and a float16 whose products are these values, where the largest value is `most`
// times the float16. Returns false if there are none.
bool split_by(const float *values, int64_t count, float largest, int most, int8_t *integers,
              uint16_t &factor) {
  const float exact = largest / static_cast<float>(most);
  uint32_t bits;
  memcpy(&bits, &exact, 4);
  // If the float16 is normal, it equals this quotient exactly. Most candidates fail here.
  if (std::fabs(exact) >= 65520 || (std::fabs(exact) >= 0x1p-14f && (bits & 0x1fff))) return false;
  factor = half_of(exact);
  const float rounded = float_of(factor);
  for (int64_t i = 0; i < count; i++) {
    const float integer = std::rint(values[i] / rounded);
    if (!(integer * rounded == values[i] && std::fabs(integer + 0.5f) < 128)) return false;
    integers[i] = static_cast<int8_t>(integer);
  }
  return true;
}

// Find integers and a float16 whose products are these values. Returns false if there are none. The
// largest value is some integer times the float16; the integers that files use are tried first.
bool split(const float *values, int64_t count, int8_t *integers, uint16_t &factor) {
  float largest = 0;
  for (int64_t i = 0; i < count; i++)
    if (std::fabs(values[i]) > std::fabs(largest)) largest = values[i];
  std::fill_n(integers, count, static_cast<int8_t>(0)), factor = 0;
  if (largest == 0) return true;
  for (int most : {63, -128, 127, 15})
    if (split_by(values, count, largest, most, integers, factor)) return true;
  for (int most = 126; most > 0; most--)
    if (split_by(values, count, largest, most, integers, factor)) return true;
  return false;
}

// Facts about a weight's values, updated while threads read the values.
struct Facts {
  std::atomic<int> least{32767}, most{-32768};
  std::atomic<bool> finite{true}, narrow{true};  // whether all scales and minimums are finite; are float16
  std::atomic<bool> products;                    // whether all scales and minimums can be split

  void see(Range levels) {
    for (int old = least; levels.least < old && !least.compare_exchange_weak(old, levels.least);)
      continue;
    for (int old = most; levels.most > old && !most.compare_exchange_weak(old, levels.most);)
      continue;
  }
  void see(const float *values, int64_t count) {
    int8_t integers[MOST_SHARED];
    uint16_t factor;
    for (int64_t i = 0; i < count; i++) {
      if (!std::isfinite(values[i])) finite = false;
      else if (narrow && !is_float16(values[i])) narrow = false;
    }
    if (finite && products && !split(values, count, integers, factor)) products = false;
  }
};

bool can_have_planes(const Matrix &m) { return m.format == BITS8 && !m.fine && !m.minimums; }

// Whether no level that the type allows can change the format any more.
bool is_widest(Range seen, Range possible) {
  Matrix now = {}, last = {};
  find_format(seen, now);
  find_format(possible, last);
  return now.format == last.format && now.zero == last.zero;
}

Range range_of(const Levels &levels, const Unit &unit) {
  int16_t least = 32767, most = -32768;
  for (int64_t c = 0; c < unit.columns; c++)
    for (int64_t k = 0; k < unit.count; k++)
      least = std::min(least, levels[c][k]), most = std::max(most, levels[c][k]);
  return {least, most};
}

void look_at(const Source &source, const Matrix &matrix, const Unit &unit, Facts &facts) {
  Shared shared;
  read_shared(source, matrix, unit, shared);
  const int64_t rows = unit.count / (matrix.fine ? 16 : BLOCK);
  for (int64_t c = 0; c < unit.columns; c++) {
    facts.see(shared.scales[c], rows);
    if (matrix.minimums) facts.see(shared.minimums[c], rows);
  }
  if (is_widest({facts.least, facts.most}, kind_of(source).levels)) return;
  Levels levels;
  read_levels(source, unit, levels);
  facts.see(range_of(levels, unit));
}

// Pack 4 bits of each level of a block, from a given bit on.
void pack_low_bits(const uint8_t (&groups)[8][64], int first_bit, uint8_t *to) {
  for (int g = 0; g < 4; g++)
    for (int j = 0; j < 64; j++) {
      const int low = groups[g][j] >> first_bit & 15, high = groups[g + 4][j] >> first_bit & 15;
      to[g * 64 + j] = static_cast<uint8_t>(low | high << 4);
    }
}

// Pack the levels of a block in a format; for two planes, pack the upper plane.
void pack_bits(const uint8_t (&groups)[8][64], Format format, uint8_t *to) {
  if (format == BITS8) {
    memcpy(to, groups, sizeof groups);
    return;
  }
  pack_low_bits(groups, format == PLANES ? 4 : 0, to);
  if (format == BITS5)
    for (int byte = 0; byte < 64; byte++) {
      int bits = 0;
      for (int i = 0; i < 8; i++) bits |= (groups[byte / 8][byte % 8 * 8 + i] >> 4 & 1) << i;
      to[HALF + byte] = static_cast<uint8_t>(bits);
    }
  if (format == BITS6)
    for (int byte = 0; byte < 128; byte++) {
      int bits = 0;
      for (int i = 0; i < 4; i++) bits |= (groups[byte / 64 * 4 + i][byte % 64] >> 4 & 3) << i * 2;
      to[HALF + byte] = static_cast<uint8_t>(bits);
    }
}

// Pack the levels of a unit. Returns false if a level does not fit the format.
bool pack_levels(const Source &source, const Matrix &matrix, const Unit &unit, uint8_t *to) {
  Levels levels;
  uint8_t bytes[PANEL][UNIT_INPUTS] = {}, groups[8][64];
  read_levels(source, unit, levels);
  int all = 0;
  for (int64_t c = 0; c < unit.columns; c++)
    for (int64_t k = 0; k < unit.count; k++) {
      const int level = levels[c][k] + matrix.zero;
      all |= level, bytes[c][k] = static_cast<uint8_t>(level);
    }
  uint8_t *const panel = to + unit.panel * matrix.panel_bytes();
  for (int64_t at = 0; at < unit.count; at += BLOCK) {
    for (int64_t g = 0; g < 8; g++)
      for (int64_t c = 0; c < PANEL; c++) memcpy(&groups[g][c * 4], &bytes[c][at + g * 4], 4);
    const int64_t block = (unit.first + at) / BLOCK;
    pack_bits(groups, matrix.format, panel + matrix.blocks().at(block));
    if (matrix.has_planes())
      pack_low_bits(groups, 0, to + matrix.lower_at(unit.panel) + block * HALF);
  }
  return are_levels(all, matrix.format);
}

template <typename Value>
void store(uint8_t *to, int64_t index, Value value) {
  memcpy(to + index * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

// Pack the scales of a unit, or its minimums, which follow the scales. Returns false if their kind is not the matrix's kind.
bool pack_shared(const float (&values)[PANEL][MOST_SHARED], const Matrix &matrix, const Unit &unit,
                 bool behind, uint8_t *to) {
  const int64_t halves = matrix.fine ? 2 : 1, rows = unit.count / BLOCK * halves;
  uint8_t *const panel = to + unit.panel * matrix.panel_bytes();
  bool fits = true;
  for (int64_t c = 0; c < PANEL; c++) {
    int8_t integers[MOST_SHARED];
    uint16_t factor;
    if (matrix.scales == SPLIT) {
      fits = split(values[c], rows, integers, factor) && fits;
      store(panel + matrix.blocks().factors_at(unit.first / BLOCK), c + (behind ? PANEL : 0),
            factor);
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t block = unit.first / BLOCK + r / halves;
      const int64_t index = (r % halves + (behind ? halves : 0)) * PANEL + c;
      uint8_t *const at = panel + matrix.blocks().at(block) + matrix.level_bytes();
      if (matrix.scales == WIDE) store(at, index, values[c][r]);
      if (matrix.scales == SPLIT) store(at, index, integers[r]);
      if (matrix.scales != NARROW) continue;
      store(at, index, half_of(values[c][r]));
      fits = fits && is_float16(values[c][r]);
    }
  }
  return fits;
}

bool pack_unit(const Source &source, const Matrix &matrix, const Unit &unit, uint8_t *to) {
  Shared shared;
  read_shared(source, matrix, unit, shared);
  return pack_levels(source, matrix, unit, to) &&
         pack_shared(shared.scales, matrix, unit, false, to) &&
         (!matrix.minimums || pack_shared(shared.minimums, matrix, unit, true, to));
}

template <typename Value>
void pack_floats(const Source &source, const Matrix &matrix, const Unit &unit, uint8_t *to) {
  const int64_t row = PANEL * static_cast<int64_t>(sizeof(Value));
  uint8_t *const start = to + unit.panel * matrix.panel_bytes() + unit.first * row;
  if (unit.columns < PANEL) memset(start, 0, static_cast<size_t>(unit.count * row));
  read_array<Value>(source.values, unit,
                    [&](int64_t c, int64_t k, Value value) { store(start, k * PANEL + c, value); });
}

// The properties of a weight's panels that follow from its type and arrays. The weight's values determine the other properties.
Matrix described(const Source &source) {
  Matrix matrix = {
      nullptr, static_cast<Format>(source.type), source.inputs, source.outputs, 0, false, NARROW,
      false};
  if (source.type <= BFLOATS16) return matrix;
  const bool array = source.type <= UINT8;
  matrix.format = BITS8;
  matrix.fine = array ? source.inputs / source.groups < BLOCK : kind_of(source).fine;
  matrix.minimums = array ? source.minimums.data != nullptr : kind_of(source).minimums;
  return matrix;
}

const char *plan(const Source &source, int64_t threads, Matrix &matrix) {
  if (const char *why = check(source)) return why;
  matrix = described(source);
  if (!matrix.has_levels()) return nullptr;
  Facts facts;
  facts.products = source.inputs % UNIT_INPUTS == 0;
  each_unit(matrix, threads, [&](const Unit &unit) { look_at(source, matrix, unit, facts); });
  if (!facts.finite) return "a scale or a minimum is not a finite number";
  find_format({facts.least, facts.most}, matrix);
  if (matrix.minimums && matrix.zero) return "levels below 0 cannot have minimums";
  if (source.planes && can_have_planes(matrix)) matrix.format = PLANES;
  matrix.scales = facts.narrow ? NARROW : facts.products ? SPLIT : WIDE;
  return nullptr;
}

const char *pack(const Source &source, int64_t threads, const Matrix &matrix, uint8_t *to) {
  std::atomic<bool> fits{true};
  each_unit(matrix, threads, [&](const Unit &unit) {
    if (source.type == FLOATS32) pack_floats<uint32_t>(source, matrix, unit, to);
    else if (source.type <= BFLOATS16) pack_floats<uint16_t>(source, matrix, unit, to);
    else if (!pack_unit(source, matrix, unit, to)) fits = false;
  });
  return fits ? nullptr : "the weight has changed while it was packed";
}

}  // namespace
}  // namespace eesd

using eesd::Matrix;

extern "C" {

const char *eesd_plan(const eesd::Source *source, int64_t threads, int64_t *numbers) {
  Matrix m = {};
  if (const char *why = eesd::plan(*source, threads, m)) return why;
  const int64_t found[] = {m.format, m.inputs, m.outputs,  m.zero,
                           m.fine,   m.scales, m.minimums, m.bytes()};
  memcpy(numbers, found, sizeof found);
  return nullptr;
}

const char *eesd_pack(const eesd::Source *source, int64_t threads, const int64_t *n, uint8_t *to) {
  Matrix m = eesd::described(*source);
  m.format = static_cast<eesd::Format>(n[0]), m.scales = static_cast<eesd::Scales>(n[5]);
  m.zero = static_cast<int32_t>(n[3]);
  return eesd::pack(*source, threads, m, to);
}
}
