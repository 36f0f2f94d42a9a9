// The operators of the domain `eesd`, and their registration in ONNX Runtime. docs/operators.md describes their inputs.
#include "fetching.h"
#include "pages.h"
#include "session.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

namespace eesd {
namespace {

constexpr int64_t FEW = 8;          // below this number of rows, one thread is faster than several
constexpr int64_t MANY = 64;        // from this number of rows on, threads should not wait for each other
constexpr int64_t LIMIT = 1 << 28;  // upper limit of sizes, beyond those of any model

// Settings of the nodes of new sessions; see eesd_configure.
struct Settings {
  const Kernels *kernels = nullptr;
  int64_t threads = 1;
  bool int8 = true;
  Cells cells = FLOATS;
  int64_t most_copied = 0;
} settings;

int64_t positive(const Node &node, const char *name) {
  const int64_t value = node.integer(name);
  check(value > 0 && value < LIMIT, name);
  return value;
}

// A packed weight. The attribute `matrices` describes each matrix by 7 numbers: the members of Matrix after `data`, in order.
struct Weights : std::vector<Matrix> {
  std::vector<Pages> pages;  // keeps the pages alive that the matrices read
};
Weights read_matrices(const Node &node, size_t first_input) {
  const std::vector<int64_t> numbers = node.integers("matrices");
  check(!numbers.empty() && numbers.size() % 7 == 0, "matrices needs 7 numbers for each weight");
  Weights matrices;
  for (size_t i = 0; i < numbers.size(); i += 7) {
    const int64_t *n = &numbers[i];
    check(n[0] >= FLOAT32 && n[0] <= UPPER && n[1] > 0 && n[1] < LIMIT && n[2] > 0 && n[2] < LIMIT, "a weight has no such size");
    check(n[3] >= 0 && n[3] <= 255, "the level of 0 is out of range");
    check(n[5] >= NARROW && n[5] <= SPLIT, "there are no such scales");
    const Tensor data = node.constant(first_input + i / 7);
    const uint8_t *const bytes = in_large_pages(static_cast<const uint8_t *>(data.data), settings.most_copied, matrices.pages);
    const Matrix matrix = {bytes, static_cast<Format>(n[0]), n[1], n[2],
                           static_cast<int32_t>(n[3]), n[4] != 0, static_cast<Scales>(n[5]), n[6] != 0};
    check(!matrix.minimums || matrix.zero == 0, "a weight has either a level of 0 or minimums");
    check(!matrix.has_planes() || (!matrix.fine && !matrix.minimums), "two planes have a scale for 32 inputs and no minimums");
    check(!matrix.has_levels() || matrix.inputs % BLOCK == 0, "levels need a multiple of 32 inputs");
    check(matrix.scales != SPLIT || matrix.inputs % (SUPER * BLOCK) == 0, "split scales need a multiple of 256 inputs");
    check(data.type == ort::UINT8 && data.size() == matrix.bytes(), "a weight has another size");
    matrices.push_back(matrix);
  }
  return matrices;
}

// A value of a weight. The rows of an embedding table are the columns of the weight.
float weight_at(const Matrix &w, int64_t k, int64_t column) {
  const uint8_t *panel = w.data + column / PANEL * w.panel_bytes();
  const int64_t c = column % PANEL;
  if (w.format == FLOAT32) return reinterpret_cast<const float *>(panel)[k * PANEL + c];
  const uint16_t *narrow = reinterpret_cast<const uint16_t *>(panel) + k * PANEL + c;
  if (w.format == BFLOAT16) {
    const uint32_t bits = static_cast<uint32_t>(*narrow) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  if (w.format == FLOAT16) return float_of(*narrow);
  const uint8_t *block = panel + w.blocks().at(k / BLOCK), *scales = block + w.level_bytes();
  const int64_t i = k % BLOCK, group = i / 4, byte = c * 4 + i % 4;
  int32_t level;
  if (w.format == BITS8) {
    level = block[group * 64 + byte];
  } else {
    level = block[group % 4 * 64 + byte] >> (group / 4 * 4) & 15;
    if (w.format == BITS5) level |= (block[256 + group * 8 + byte / 8] >> byte % 8 & 1) << 4;
    if (w.format == BITS6) level |= (block[256 + group / 4 * 64 + byte] >> group % 4 * 2 & 3) << 4;
    if (w.format == PLANES)
      level = level << 4 | (w.data[w.lower_at(column / PANEL) + k / BLOCK * HALF + group % 4 * 64 + byte] >> (group / 4 * 4) & 15);
  }
  const int64_t halves = w.fine ? 2 : 1, at = (w.fine ? i / 16 : 0) * PANEL + c;
  const uint16_t *factors = reinterpret_cast<const uint16_t *>(panel + w.blocks().factors_at(k / BLOCK));
  const auto scale_at = [&](int64_t index, int64_t factor) {
    if (w.scales == WIDE) return reinterpret_cast<const float *>(scales)[index];
    if (w.scales == NARROW) return float_of(reinterpret_cast<const uint16_t *>(scales)[index]);
    return static_cast<float>(reinterpret_cast<const int8_t *>(scales)[index]) * float_of(factors[factor]);
  };
  const float integer = w.format == UPPER ? static_cast<float>(16 * level - w.zero) + 7.5f : static_cast<float>(level - w.zero);
  const float value = integer * scale_at(at, c);
  return w.minimums ? value + scale_at(halves * PANEL + at, PANEL + c) : value;
}

// ids [T] int64, table -> x [T, K]
class Embed {
 public:
  static constexpr const char *name = "Embed";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Embed(const Node &node) : table_(read_matrices(node, 1)) {}

  void run(const Call &call) const {
    const Tensor ids = call.input(0);
    check(ids.type == ort::INT64, "ids are int64");
    const Matrix &w = table_[0];
    const int64_t *id = static_cast<const int64_t *>(ids.data), count = ids.size();
    for (int64_t t = 0; t < count; t++) check(id[t] >= 0 && id[t] < w.outputs, "a token id is not in the vocabulary");
    float *x = call.output<float>(0, {count, w.inputs});
    call.parallel(count, count < FEW ? 1 : settings_.threads * 2, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++)
        for (int64_t k = 0; k < w.inputs; k++) x[t * w.inputs + k] = weight_at(w, k, id[t]);
    });
  }

 private:
  const Settings settings_ = settings;
  Weights table_;
};

// Memory for the prepared activations of some rows.
class Ready {
 public:
  Ready(const Settings &of, int64_t rows, int64_t inputs, bool levels)
      : settings_(of), rows_(rows), inputs_(inputs), blocks_(levels ? rows * inputs / BLOCK : 0), levels_(levels),
        int8_(of.int8 && levels) {}

  size_t bytes() const {
    const int64_t size = rows_ * inputs_;
    return Scratch::bytes_of<float>(size) + Scratch::bytes_of<int8_t>(size) + 3 * Scratch::bytes_of<float>(blocks_) +
           2 * Scratch::bytes_of<float>(2 * blocks_) + 512;
  }

  // Prepare x [rows, inputs] on some of the session's threads.
  void prepare(const Call &call, Scratch &memory, const float *x, const float *norm, float epsilon) {
    const int64_t size = rows_ * inputs_;
    job_ = {x, norm, epsilon, inputs_, int8_, levels_, memory.take<float>(size), memory.take<float>(blocks_),
            {memory.take<float>(blocks_), memory.take<float>(2 * blocks_)}, memory.take<int8_t>(size),
            {memory.take<int32_t>(blocks_), memory.take<int32_t>(2 * blocks_)}};
    call.parallel(rows_, rows_ < FEW || !(norm || levels_) ? 1 : settings_.threads,
                  [&](int64_t first, int64_t last) { settings_.kernels->prepare(job_, first, last); });
  }

  // The activations for products, from row `row` on.
  Activations from(int64_t row) const {
    const int64_t value = row * inputs_, block = levels_ ? value / BLOCK : 0;
    return {(job_.norm ? job_.normed : job_.x) + value, int8_ ? job_.levels + value : nullptr, job_.scales + block,
            {job_.sums[0] + block, job_.sums[1] + 2 * block}, {job_.shares[0] + block, job_.shares[1] + 2 * block}, fetching.whole()};
  }

 private:
  const Settings &settings_;
  int64_t rows_, inputs_, blocks_;
  bool levels_, int8_;
  Preparation job_ = {};
};

// x [T, K], norm [K] or [0], bias [N] or [0], residual [T, N] or [0], weights ... -> y [T, N]
class Multiply {
 public:
  static constexpr const char *name = "Product";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Multiply(const Node &node)
      : epsilon_(node.real("epsilon")), gating_(static_cast<Gating>(node.integer("gating"))), parts_(read_matrices(node, 4)),
        inputs_(parts_[0].inputs) {
    for (const Matrix &part : parts_) {
      check(part.inputs == inputs_, "weights of one product have the same inputs");
      columns_ += part.outputs, panels_ += part.panels(), levels_ |= part.has_levels();
      level_bytes_ += part.has_levels() ? part.panels() * part.panel_bytes() : 0;
    }
    norm_ = node.floats(1, inputs_, "the norm has another size");
    bias_ = node.floats(2, columns_, "the bias has another size");
    outputs_ = columns_;
    check(gating_ >= APART && gating_ <= CLAMPED, "the gating is unknown");
    if (gating_ == APART) return;
    check(parts_.size() == 2 && parts_[0].outputs == parts_[1].outputs, "gate and up have the same size");
    check(parts_[0].has_levels() == parts_[1].has_levels() && (levels_ || parts_[0].format == parts_[1].format),
          "gate and up are of one kind");
    outputs_ /= 2, panels_ /= 2;
  }

  void run(const Call &call) const {
    const Tensor x = call.input(0), residual = call.input(3);
    check(x.type == ort::FLOAT && !x.shape.empty() && x.shape.back() == inputs_, "x has another width");
    const int64_t rows = x.size() / inputs_;
    check(residual.size() == 0 || (residual.type == ort::FLOAT && residual.size() == rows * outputs_),
          "the residual has another size");
    Ready ready(settings_, rows, inputs_, levels_);
    Scratch memory(ready.bytes());
    ready.prepare(call, memory, x.floats(), norm_, epsilon_);
    Product job = {parts_.data(), static_cast<int64_t>(parts_.size()), gating_, ready.from(0),
                   bias_, residual.size() ? residual.floats() : nullptr, nullptr, rows, outputs_};
    job.y = call.output<float>(0, {rows, outputs_});
    if (rows == 0) return;
    fetching.run(levels_ && rows == 1 ? level_bytes_ : 0, [&](bool whole) {
      job.a.whole_blocks = whole;
      call.parallel(panels_, settings_.threads * (rows < MANY ? 1 : 4), [&](int64_t first, int64_t last) { settings_.kernels->multiply(job, first, last); });
    });
  }

 private:
  const Settings settings_ = settings;
  float epsilon_;
  Gating gating_;
  bool levels_ = false;
  Weights parts_;
  int64_t inputs_, outputs_ = 0, columns_ = 0, panels_ = 0, level_bytes_ = 0;
  const float *norm_, *bias_;
};

// Several products, each with this number of panels. `rows` is the largest number of rows.
void multiply_each(const Call &call, const Settings &settings, const std::vector<Product> &jobs, int64_t panels, int64_t rows) {
  const int64_t all = panels * static_cast<int64_t>(jobs.size());
  call.parallel(all, settings.threads * (rows < MANY && jobs.size() == 1 ? 1 : 4), [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last;) {
      const int64_t job = at / panels, stop = std::min(last, (job + 1) * panels);
      settings.kernels->multiply(jobs[static_cast<size_t>(job)], at - job * panels, stop - job * panels);
      at = stop;
    }
  });
}

// x [T, heads K], a weight of each head -> y [T, heads N]: each head's part of x, times the head's weight.
class MultiplyHeads {
 public:
  static constexpr const char *name = "ByHeads";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit MultiplyHeads(const Node &node) : parts_(read_matrices(node, 1)) {
    for (const Matrix &part : parts_)
      check(part.inputs == parts_[0].inputs && part.outputs == parts_[0].outputs && part.has_levels() == parts_[0].has_levels(),
            "the weights of heads have the same sizes, and are of one kind");
  }

  void run(const Call &call) const {
    const Tensor x = call.input(0);
    const Matrix &one = parts_[0];
    const int64_t heads = static_cast<int64_t>(parts_.size()), width = heads * one.inputs, columns = heads * one.outputs;
    check(x.type == ort::FLOAT && !x.shape.empty() && x.shape.back() == width, "x has another width");
    const int64_t tokens = x.size() / width;
    float *y = call.output<float>(0, {tokens, columns});
    if (!tokens) return;
    Ready ready(settings_, heads * tokens, one.inputs, one.has_levels());
    Scratch memory(ready.bytes() + Scratch::bytes_of<float>(tokens * width));
    float *gathered = memory.take<float>(tokens * width);  // all tokens of a head, one after another
    for (int64_t h = 0; h < heads; h++)
      for (int64_t t = 0; t < tokens; t++)
        memcpy(gathered + (h * tokens + t) * one.inputs, x.floats() + t * width + h * one.inputs, static_cast<size_t>(one.inputs) * sizeof(float));
    ready.prepare(call, memory, gathered, nullptr, 0);
    std::vector<Product> jobs;
    for (int64_t h = 0; h < heads; h++)
      jobs.push_back({&parts_[static_cast<size_t>(h)], 1, APART, ready.from(h * tokens), nullptr, nullptr, y + h * one.outputs, tokens, columns});
    multiply_each(call, settings_, jobs, one.panels(), tokens);
  }

 private:
  const Settings settings_ = settings;
  Weights parts_;
};

// x [T, H], norm [H] or [0], logits [T, E], residual [T, H] or [0], biases of gate and up [E, 2 I] and of down [E, H] or [0], factors
// of the weights [E] or [0], biases of the choice [E] or [0], gate, up and down of each expert -> y [T, H]: the results of the k experts
// with the largest logits or scores, times their weights, added up. Weights of experts that no token uses are not read.
class Mixture {
 public:
  static constexpr const char *name = "Mixture";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Mixture(const Node &node)
      : epsilon_(node.real("epsilon")), gating_(static_cast<Gating>(node.integer("gating"))), used_(positive(node, "used")),
        normed_(node.integer("normed") != 0), scores_(static_cast<Scores>(node.integer("scores"))), groups_(positive(node, "groups")),
        used_groups_(positive(node, "used_groups")), group_best_(positive(node, "group_best")), norm_epsilon_(node.real("norm_eps")),
        scale_(node.real("scale")), margin_(node.real("margin")), parts_(read_matrices(node, 8)), experts_(static_cast<int64_t>(parts_.size()) / 3) {
    check(parts_.size() % 3 == 0 && used_ <= experts_, "an expert has three weights, and a token uses no more experts than there are");
    check(gating_ >= SILU && gating_ <= CLAMPED, "the gating is unknown");
    check(scores_ >= SOFTMAX && scores_ <= SPARSEMIXER, "the scores are unknown");
    check(experts_ % groups_ == 0 && used_groups_ <= groups_ && group_best_ <= experts_ / groups_ &&
              used_ <= used_groups_ * (experts_ / groups_),
          "groups have equal numbers of experts, and a token uses no more groups and experts than there are");
    const Matrix &gate = parts_[0], &down = parts_[2];
    for (size_t i = 0; i < parts_.size(); i += 3) {
      check(parts_[i].inputs == gate.inputs && parts_[i].outputs == gate.outputs && parts_[i + 1].inputs == gate.inputs &&
                parts_[i + 1].outputs == gate.outputs && parts_[i + 2].inputs == gate.outputs && parts_[i + 2].outputs == gate.inputs,
            "the experts have the same sizes");
      check(parts_[i].has_levels() == gate.has_levels() && parts_[i + 1].has_levels() == gate.has_levels() &&
                (gate.has_levels() || parts_[i].format == parts_[i + 1].format) && parts_[i + 2].has_levels() == down.has_levels(),
            "gate and up are of one kind, and so are the experts");
    }
    norm_ = node.floats(1, gate.inputs, "the norm has another size");
    inner_bias_ = node.floats(4, experts_ * 2 * gate.outputs, "biases have another size");
    bias_ = node.floats(5, experts_ * gate.inputs, "biases have another size");
    factors_ = node.floats(6, experts_, "there is a factor for each expert");
    choice_bias_ = node.floats(7, experts_, "there is a bias of the choice for each expert");
  }

  void run(const Call &call) const {
    const Tensor x = call.input(0), logits = call.input(2), residual = call.input(3);
    const int64_t hidden = parts_[0].inputs, inner = parts_[0].outputs;
    check(x.type == ort::FLOAT && !x.shape.empty() && x.shape.back() == hidden, "x has another width");
    const int64_t tokens = x.size() / hidden, pairs = tokens * used_;
    check(logits.type == ort::FLOAT && logits.size() == tokens * experts_, "logits have another size");
    check(residual.size() == 0 || (residual.type == ort::FLOAT && residual.size() == x.size()), "the residual has another size");
    float *y = call.output<float>(0, {tokens, hidden});
    if (!tokens) return;
    Routing routing = {{logits.floats(), experts_, used_, nullptr, nullptr},
                       normed_, factors_, scores_, choice_bias_, groups_, used_groups_, group_best_, norm_epsilon_, scale_, margin_, nullptr, nullptr};
    const int64_t scored = routing.by_logits() ? 0 : tokens * experts_;
    Ready outer(settings_, pairs, hidden, parts_[0].has_levels()), middle(settings_, pairs, inner, parts_[2].has_levels());
    Scratch memory(outer.bytes() + middle.bytes() + 2 * Scratch::bytes_of<float>(pairs * hidden) +
                   Scratch::bytes_of<float>(pairs * inner) + 2 * Scratch::bytes_of<float>(pairs) + 2 * Scratch::bytes_of<int64_t>(pairs) +
                   Scratch::bytes_of<float>(4 * scored) + Scratch::bytes_of<int64_t>(scored));
    int64_t *found = memory.take<int64_t>(pairs), *rows = memory.take<int64_t>(pairs);
    float *weights = memory.take<float>(pairs), *ordered = memory.take<float>(pairs), *gathered = memory.take<float>(pairs * hidden);
    float *gated = memory.take<float>(pairs * inner), *given = memory.take<float>(pairs * hidden);
    routing.top.found = found, routing.top.logprobs = weights;
    routing.memory = memory.take<float>(4 * scored), routing.columns = memory.take<int64_t>(scored);
    call.parallel(tokens, tokens < FEW ? 1 : settings_.threads,
                  [&](int64_t first, int64_t last) { settings_.kernels->route(routing, first, last); });
    const std::vector<int64_t> starts = sort(tokens, found, weights, rows, ordered);
    for (int64_t i = 0; i < pairs; i++)
      memcpy(gathered + rows[i] * hidden, x.floats() + i / used_ * hidden, static_cast<size_t>(hidden) * sizeof(float));
    outer.prepare(call, memory, gathered, norm_, epsilon_);
    multiply(call, outer, starts, 0, gating_, inner, gated);
    middle.prepare(call, memory, gated, nullptr, 0);
    multiply(call, middle, starts, 2, APART, hidden, given);
    const Combination job = {given, ordered, rows, used_, hidden, residual.size() ? residual.floats() : nullptr, y};
    call.parallel(tokens, tokens < FEW ? 1 : settings_.threads,
                  [&](int64_t first, int64_t last) { settings_.kernels->combine(job, first, last); });
  }

 private:
  // Order the rows of products by expert, and the rows and weights of each token in the same order. Returns the index at which each
  // expert's rows begin, and the end.
  std::vector<int64_t> sort(int64_t tokens, const int64_t *found, const float *weights, int64_t *rows, float *ordered) const {
    std::vector<int64_t> starts(static_cast<size_t>(experts_) + 1), order(static_cast<size_t>(used_));
    for (int64_t i = 0; i < tokens * used_; i++) starts[static_cast<size_t>(found[i]) + 1]++;
    for (size_t e = 1; e < starts.size(); e++) starts[e] += starts[e - 1];
    std::vector<int64_t> next(starts);
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t *own = found + t * used_;
      for (int64_t i = 0; i < used_; i++) order[static_cast<size_t>(i)] = i;
      std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return own[a] < own[b]; });
      for (int64_t i = 0; i < used_; i++) {
        const int64_t one = order[static_cast<size_t>(i)];
        rows[t * used_ + i] = next[static_cast<size_t>(own[one])]++;
        ordered[t * used_ + i] = weights[t * used_ + one];
      }
    }
    return starts;
  }

  // Multiply a weight of each expert, or two weights with gating, by the expert's rows.
  void multiply(const Call &call, const Ready &ready, const std::vector<int64_t> &starts, size_t part, Gating gating, int64_t columns,
                float *y) const {
    std::vector<Product> jobs;
    int64_t most = 0;
    for (size_t e = 0; e + 1 < starts.size(); e++) {
      const int64_t first = starts[e], rows = starts[e + 1] - first;
      if (!rows) continue;
      const float *bias = gating ? inner_bias_ : bias_;
      if (bias) bias += static_cast<int64_t>(e) * (gating ? 2 : 1) * columns;
      jobs.push_back({&parts_[3 * e + part], gating ? 2 : 1, gating, ready.from(first), bias, nullptr, y + first * columns, rows, columns});
      most = std::max(most, rows);
    }
    multiply_each(call, settings_, jobs, parts_[part].panels(), most);
  }

  const Settings settings_ = settings;
  float epsilon_;
  Gating gating_;
  int64_t used_;
  bool normed_;
  Scores scores_;
  int64_t groups_, used_groups_, group_best_;
  float norm_epsilon_, scale_, margin_;
  Weights parts_;
  int64_t experts_;
  const float *norm_, *inner_bias_, *bias_, *factors_, *choice_bias_;
};

// qkv [T, (H + 2 KV) D], tokens [T, 5] int64, paths [T, P] int32, cos and sin [S, D / 2] or [0], norms of q and k [D] or [0],
// sinks [H] or [0] -> y [T, H D]. With latent attention, a row of D numbers begins with `rank` compressed ones: qkv [T, (H + 1) D] has the
// compressed queries of all heads, their other D - rank numbers, and the row; cos and sin are [S, (D - rank) / 2], and y is [T, H rank].
// A row of tokens has the address of the cache, the position, the slot, the context, and the length of
// the path.
class Attend {
 public:
  static constexpr const char *name = "Attention";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Attend(const Node &node) {
    job_.heads = node.integer("heads");
    job_.kv_heads = positive(node, "kv_heads");
    job_.head_dim = positive(node, "head_dim");
    job_.width = (job_.head_dim + 15) / 16 * 16;
    job_.rank = node.integer("rank");
    check(job_.rank >= 0 && job_.rank < job_.head_dim, "the rank is out of range");
    job_.value_dim = job_.rank ? job_.rank : job_.head_dim;
    job_.value_width = (job_.value_dim + 15) / 16 * 16;
    job_.slots = positive(node, "slots");
    job_.layer = node.integer("layer");
    job_.cache_heads = positive(node, "cache_heads");
    job_.cache_width = (positive(node, "cache_dim") + 15) / 16 * 16;
    job_.writes = node.integer("writes") != 0;
    job_.hides_first = node.integer("hides_first") != 0;
    job_.norms_last = node.integer("norms_last") != 0;
    job_.scale = node.real("scale");
    job_.cap = node.real("cap");
    job_.window = node.integer("window");
    check(job_.cap >= 0 && job_.window >= 0 && job_.window < LIMIT, "the cap or the window is out of range");
    job_.epsilon = node.real("epsilon");
    check(job_.heads >= 0 && job_.heads < LIMIT && job_.heads % job_.kv_heads == 0, "heads is no multiple of kv_heads");
    const int64_t rotated = job_.head_dim - job_.rank, parts = job_.rank ? 2 : 1;
    check(job_.width <= (job_.rank ? MAX_WIDTH : MAX_HEAD) && rotated % 2 == 0, "a head has at most 512 values, an even number");
    check(!job_.rank || job_.kv_heads == 1, "rows of latent attention have one KV head");
    check(job_.slots % 16 == 0 && job_.layer >= 0 && job_.layer < LIMIT, "slots are a multiple of 16");
    check(job_.cache_heads < LIMIT && job_.cache_width <= MAX_HEAD && job_.kv_heads <= job_.cache_heads &&
              job_.kv_heads * job_.width <= parts * job_.cache_heads * job_.cache_width,
          "the heads do not fit the caches");
    const Tensor cos = node.constant(3), sin = node.constant(4);
    positions_ = cos.size() / (rotated / 2);
    check(cos.type == ort::FLOAT && sin.type == ort::FLOAT && cos.size() == sin.size(), "cos and sin are tables of float32");
    if (cos.size()) job_.cos = cos.floats(), job_.sin = sin.floats();
    job_.q_norm = node.floats(5, job_.head_dim, "the norm of queries has another size");
    job_.k_norm = node.floats(6, job_.head_dim, "the norm of keys has another size");
    job_.sinks = node.floats(7, job_.heads, "there is a sink for each head");
  }

  void run(const Call &call) const {
    const Tensor qkv = call.input(0), rows = call.input(1), paths = call.input(2);
    Attention job = job_;
    const std::vector<Token> tokens = read_tokens(rows, paths);
    const int64_t count = static_cast<int64_t>(tokens.size()), written = job.writes ? (job.rank ? 1 : 2) * job.kv_heads : 0;
    check(!job.rank || settings_.cells != LEVELS, "rows of latent attention have no levels");
    job.columns = (job.heads + written) * job.head_dim;
    check(qkv.type == ort::FLOAT && qkv.size() == count * job.columns, "qkv has another size");
    job.cells = settings_.cells;
    job.tokens = tokens.data();
    job.qkv = qkv.floats();
    job.y = call.output<float>(0, {count, job.heads * job.value_dim});
    int64_t longest = 0;
    for (const Token &token : tokens) longest = token.seen() > longest ? token.seen() : longest;
    const std::vector<int64_t> groups = group(tokens);
    const int64_t num_groups = static_cast<int64_t>(groups.size()) - 1, chunks = (longest + CHUNK - 1) / CHUNK;
    // If there are enough groups of tokens, a unit of work covers all chunks of a group; if not, the chunks are divided among units.
    const bool split = num_groups * job.kv_heads < 4 * settings_.threads;
    job.chunks = split ? chunks : 1;
    const int64_t q_size = count * job.heads * job.width, part_size = count * job.heads * job.chunks * (2 + job.width);
    Scratch memory(Scratch::bytes_of<float>(q_size) + Scratch::bytes_of<float>(part_size) + 128);
    job.q = memory.take<float>(q_size);
    job.partial = memory.take<float>(part_size);
    call.parallel(count, count < FEW ? 1 : settings_.threads, [&](int64_t first, int64_t last) { settings_.kernels->write(job, first, last); });
    if (!job.heads) return;
    const int64_t shares = split ? chunks : 1, units = num_groups * job.kv_heads * shares;
    call.parallel(units, units, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const int64_t unit = split ? i : units - 1 - i;  // later tokens first, because they see more slots
        const int64_t share = unit % shares, kv = unit / shares % job.kv_heads, g = unit / shares / job.kv_heads;
        const int64_t first_chunk = split ? share : 0, last_chunk = split ? share + 1 : chunks;
        settings_.kernels->attend(job, groups[static_cast<size_t>(g)], groups[static_cast<size_t>(g + 1)], kv, first_chunk, last_chunk);
      }
    });
    call.parallel(count, count * job.chunks < 4 * FEW ? 1 : settings_.threads,
                  [&](int64_t first, int64_t last) { settings_.kernels->finish(job, first, last); });
  }

 private:
  // Check every number, because it becomes an address.
  std::vector<Token> read_tokens(const Tensor &rows, const Tensor &paths) const {
    check(rows.type == ort::INT64 && rows.shape.size() == 2 && rows.shape[1] == 5, "tokens are [T, 5] int64");
    check(paths.type == ort::INT32 && paths.shape.size() == 2 && paths.shape[0] == rows.shape[0], "paths are [T, P] int32");
    std::vector<Token> tokens(static_cast<size_t>(rows.shape[0]));
    const int64_t *row = static_cast<const int64_t *>(rows.data);
    const int32_t *path = static_cast<const int32_t *>(paths.data);
    for (Token &token : tokens) {
      token = {reinterpret_cast<void *>(row[0]), row[1], row[2], row[3], path, row[4]};
      check(row[0] && row[0] % 64 == 0, "a cache is not aligned to 64 bytes");
      check(token.position >= 0 && (token.position < positions_ || !job_.cos), "a position is behind the last one");
      check(token.slot >= 0 && token.slot < job_.slots, "a slot is not in the cache");
      check(token.context >= 0 && token.context <= job_.slots, "a context is longer than the cache");
      check(token.path_length >= 0 && token.path_length <= paths.shape[1] && token.seen() > 0, "a path has another length");
      for (int64_t i = 0; i < token.path_length; i++)
        check(path[i] >= 0 && path[i] < job_.slots, "a slot of a path is not in the cache");
      row += 5, path += paths.shape[1];
    }
    return tokens;
  }

  // The index at which each group of consecutive tokens of one cache begins, and the end. A group's keys are read only once.
  std::vector<int64_t> group(const std::vector<Token> &tokens) const {
    std::vector<int64_t> starts;
    const int64_t most = tokens.size() > 64 ? 16 : 64;
    for (size_t t = 0; t < tokens.size(); t++)
      if (!t || tokens[t].cache != tokens[t - 1].cache || static_cast<int64_t>(t) - starts.back() == most)
        starts.push_back(static_cast<int64_t>(t));
    starts.push_back(static_cast<int64_t>(tokens.size()));
    return starts;
  }

  const Settings settings_ = settings;
  int64_t positions_ = 0;
  Attention job_ = {};
};

// States in the caches [layers, 2, kv_heads, slots, width] from a layer on. Keys are in tiles [slots / 16, width, 16]. The numbers of a
// state fill the keys of all heads, then the values, then the keys and values of the next layer.
class DeepCache {
 public:
  explicit DeepCache(const Node &node)
      : kv_heads_(positive(node, "kv_heads")), head_dim_(positive(node, "head_dim")), slots_(positive(node, "slots")),
        layer_(node.integer("layer")), size_(node.integer("size")) {
    check(size_ > 0 && size_ < LIMIT, "a state has no number");
    check(kv_heads_ < LIMIT && head_dim_ <= MAX_HEAD && slots_ < LIMIT && slots_ % 16 == 0, "slots are a multiple of 16");
    check(layer_ >= 0 && layer_ < LIMIT, "the layer is out of range");
  }

  int64_t size() const { return size_; }
  // Without tiles: where the first layer begins, and the floats of a slot in all layers that a state takes.
  int64_t first_float() const { return 2 * layer_ * kv_heads_ * slots_ * width(); }
  int64_t slot_floats() const { return (size_ + 2 * kv_heads_ * head_dim_ - 1) / (2 * kv_heads_ * head_dim_) * 2 * kv_heads_ * width(); }

  // The number of tokens, after a check of all their numbers, because these become addresses.
  int64_t checked(const Tensor &tokens) const {
    check(tokens.type == ort::INT64 && tokens.shape.size() == 2 && tokens.shape[1] == 5, "tokens are [T, 5] int64");
    const int64_t *row = static_cast<const int64_t *>(tokens.data);
    for (int64_t t = 0; t < tokens.shape[0]; t++, row += 5) {
      check(row[0] && row[0] % 64 == 0, "a cache is not aligned to 64 bytes");
      checked_slot(row[2]);
    }
    return tokens.shape[0];
  }

  // The slot of a token's ancestor at this distance along its path; -1 if there is no such ancestor.
  int64_t ancestor(const int64_t *row, const int32_t *path, int64_t distance) const {
    const int64_t place = row[3] + row[4] - 1 - distance;
    if (place < 0) return -1;
    const int64_t slot = place < row[3] ? place : path[place - row[3]];
    checked_slot(slot);
    return slot;
  }

  // The results of ancestor() for each token in order, and for the distances from 1 to `most`.
  std::vector<int64_t> ancestors(const Tensor &tokens, const Tensor &paths, int64_t most) const {
    check(paths.type == ort::INT32 && paths.shape.size() == 2 && paths.shape[0] == tokens.shape[0], "paths are [T, P] int32");
    const int64_t *row = static_cast<const int64_t *>(tokens.data);
    const int32_t *path = static_cast<const int32_t *>(paths.data);
    std::vector<int64_t> found;
    for (int64_t t = 0; t < tokens.shape[0]; t++, row += 5, path += paths.shape[1]) {
      check(row[3] >= 0 && row[4] >= 0 && row[4] <= paths.shape[1], "a path has another length");
      for (int64_t distance = 1; distance <= most; distance++) found.push_back(ancestor(row, path, distance));
    }
    return found;
  }

  void checked_slot(int64_t slot) const { check(slot >= 0 && slot < slots_, "a slot is not in the cache"); }

  // Call work(number of the token, its cache, its slot) for each token in order.
  template <typename Work> void each(const Tensor &tokens, const Work &work) const {
    const int64_t *row = static_cast<const int64_t *>(tokens.data);
    for (int64_t t = 0; t < tokens.shape[0]; t++, row += 5) work(t, reinterpret_cast<void *>(row[0]), row[2]);
  }

  void put(const float *state, void *cache, int64_t slot) const {
    rows(cache, slot, [&](int64_t i, int64_t count, float *scale, const auto &cell) {
      float most = 0, sum = 0;
      for (int64_t d = 0; d < count; d++) most = std::max(most, std::fabs(state[i + d])), sum += state[i + d] * 0;
      const float inverse = most >= 0x1p-100f ? 127 / most : 0;
      if (scale) {
        uint32_t bits;
        const float exact = most / 127 + sum;  // NaN if a number is not finite
        memcpy(&bits, &exact, 4);
        bits &= ~255u;  // then 127 times the scale is exact, so that a carried state keeps its levels and scale
        memcpy(scale, &bits, 4);
      }
      for (int64_t d = 0; d < count; d++) {
        auto &own = cell(d);
        if constexpr (sizeof own == 4) own = state[i + d];
        else if constexpr (sizeof own == 2) own = half_of(state[i + d]);
        else own = sum == 0 ? static_cast<int8_t>(std::nearbyint(state[i + d] * inverse)) : 0;
      }
    });
  }

  void get(void *cache, int64_t slot, float *state) const {
    rows(cache, slot, [&](int64_t i, int64_t count, const float *scale, const auto &cell) {
      for (int64_t d = 0; d < count; d++) {
        if constexpr (sizeof cell(d) == 2) state[i + d] = float_of(cell(d));
        else state[i + d] = scale ? static_cast<float>(cell(d)) * *scale : static_cast<float>(cell(d));
      }
    });
  }

 private:
  int64_t width() const { return (head_dim_ + 15) / 16 * 16; }

  // Call work(i, count, scale or null, cell) for the rows of a slot's state: cell(d) holds number i + d, for d from 0 to count - 1.
  template <typename Work> void rows(void *cache, int64_t slot, const Work &work) const {
    const int64_t width = this->width();
    with_cells(cells_, [&](auto of) {
      using Cell = decltype(of);
      for (int64_t i = 0, h = 2 * layer_ * kv_heads_; i < size_; h++, i += head_dim_) {  // h: of keys or of values, over all layers
        const bool is_key = h / kv_heads_ % 2 == 0;
        Cell *tile = static_cast<Cell *>(cache) + (h * slots_ + slot) / 16 * tile_of<Cell>(width);
        work(i, std::min(head_dim_, size_ - i), sizeof of == 1 ? scales_of(tile, width) + slot % 16 : nullptr,
             [&](int64_t d) -> Cell & { return tile[is_key ? key_at<Cell>(slot, d) : value_at<Cell>(slot, d, width)]; });
      }
    });
  }

  int64_t kv_heads_, head_dim_, slots_, layer_, size_;
  const Cells cells_ = settings.cells;
};

// states [T, size], tokens [T, 5] int64 -> [T, 0]. Each state is written into the slot of its token.
class WriteState {
 public:
  static constexpr const char *name = "WriteState";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit WriteState(const Node &node) : cache_(node) {}

  void run(const Call &call) const {
    const Tensor states = call.input(0), tokens = call.input(1);
    const int64_t count = cache_.checked(tokens), size = cache_.size();
    check(states.type == ort::FLOAT && states.size() == count * size, "states have another size");
    call.output<float>(0, {count, 0});
    cache_.each(tokens, [&](int64_t t, void *cache, int64_t slot) { cache_.put(states.floats() + t * size, cache, slot); });
  }

 private:
  DeepCache cache_;
};

// tokens [T, 5] int64 -> states [T, size]: the state in the slot before each token, or zeros if there is no slot before it. It is copied
// into the slot of the token, so tokens in consecutive slots, of this call or the next, all get the state before the first token.
class CarryState {
 public:
  static constexpr const char *name = "CarryState";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit CarryState(const Node &node) : cache_(node) {}

  void run(const Call &call) const {
    const Tensor tokens = call.input(0);
    const int64_t size = cache_.size();
    float *states = call.output<float>(0, {cache_.checked(tokens), size});
    cache_.each(tokens, [&](int64_t t, void *cache, int64_t slot) {
      float *state = states + t * size;
      if (slot > 0) cache_.get(cache, slot - 1, state);
      else std::fill(state, state + size, 0.0f);
      cache_.put(state, cache, slot);
    });
  }

 private:
  DeepCache cache_;
};

// tokens [T, 5] int64, paths [T, P] int32, and inputs that must be computed first -> states [T, size]: the states of the tokens' parents,
// or zeros for the first token of a text.
class ParentState {
 public:
  static constexpr const char *name = "ParentState";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit ParentState(const Node &node) : cache_(node) {}

  void run(const Call &call) const {
    const Tensor tokens = call.input(0), paths = call.input(1);
    const int64_t count = cache_.checked(tokens), size = cache_.size();
    const std::vector<int64_t> parents = cache_.ancestors(tokens, paths, 1);
    float *states = call.output<float>(0, {count, size});
    cache_.each(tokens, [&](int64_t t, void *cache, int64_t) {
      const int64_t parent = parents[static_cast<size_t>(t)];
      if (parent >= 0) cache_.get(cache, parent, states + t * size);
      else std::fill(states + t * size, states + (t + 1) * size, 0.0f);
    });
  }

 private:
  DeepCache cache_;
};

// a, b and c side by side [T, 3 size], tokens [T, 5] int64, paths [T, P] int32, weights [size, taps] -> y [T, size]. The state a c
// of each token is written into its slot. y is b times the weighted sum of the states of the token and of its ancestors.
class Convolve {
 public:
  static constexpr const char *name = "Convolution";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Convolve(const Node &node) : cache_(node), taps_(node.constant(3).size() / cache_.size()) {
    check(taps_ > 0, "a convolution has no weights");
    weights_ = node.floats(3, cache_.size() * taps_, "the weights of a convolution have another size");
  }

  void run(const Call &call) const {
    const Tensor x = call.input(0), tokens = call.input(1);
    const int64_t count = cache_.checked(tokens), size = cache_.size(), before = taps_ - 1;
    check(x.type == ort::FLOAT && x.size() == count * 3 * size, "x has another size");
    const std::vector<int64_t> ancestors = cache_.ancestors(tokens, call.input(2), before);
    const int64_t *rows = static_cast<const int64_t *>(tokens.data), parts = count < FEW ? 1 : settings_.threads;
    const auto cache_of = [rows](int64_t t) { return reinterpret_cast<void *>(rows[t * 5]); };
    float *y = call.output<float>(0, {count, size});
    Scratch memory(Scratch::bytes_of<float>(count * size) + 64);
    float *states = memory.take<float>(count * size);
    call.parallel(count, parts, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        const float *a = x.floats() + t * 3 * size, *c = a + 2 * size;
        for (int64_t i = 0; i < size; i++) states[t * size + i] = a[i] * c[i];
        cache_.put(states + t * size, cache_of(t), rows[t * 5 + 2]);
      }
    });
    call.parallel(count, parts, [&](int64_t first, int64_t last) {  // only after all states have been written
      std::vector<float> found(static_cast<size_t>(size));
      for (int64_t t = first; t < last; t++) {
        float *sum = y + t * size;
        std::fill(sum, sum + size, 0.0f);
        for (int64_t distance = before; distance > 0; distance--) {
          const int64_t slot = ancestors[static_cast<size_t>(t * before + distance - 1)];
          if (slot < 0) continue;
          cache_.get(cache_of(t), slot, found.data());
          add(found.data(), distance, sum);
        }
        add(states + t * size, 0, sum);
        const float *b = x.floats() + (3 * t + 1) * size;
        for (int64_t i = 0; i < size; i++) sum[i] *= b[i];
      }
    });
  }

 private:
  // Add the state of the ancestor at this distance, times the weights of the distance.
  void add(const float *state, int64_t distance, float *sum) const {
    for (int64_t i = 0; i < cache_.size(); i++) sum[i] += weights_[(i + 1) * taps_ - 1 - distance] * state[i];
  }

  const Settings settings_ = settings;
  DeepCache cache_;
  int64_t taps_;
  const float *weights_;
};

// x [T, columns], tokens [T, 5] int64, paths [T, P] int32, weights [mixed, 1, taps], logarithms of decays and biases [value_heads],
// norm [value_dim] or factors of values [value_heads], biases of the convolution [mixed] or empty -> y [T, values]: the gated delta rule
// or a state space. Each token's record is written into its slot, and states are recomputed from
// records. After the tiles of a cache, each layer with the rule has a header and two states of all heads. The header has the number of
// slots after which each state stands (0: it holds nothing), and the index of the committed state.
class Rule {
 public:
  static constexpr const char *name = "DeltaRule";
  static constexpr ort::Type outputs[] = {ort::FLOAT};
  explicit Rule(const Node &node)
      : cache_(node), states_at_(node.integer("states_at")), keeps_(node.integer("keeps") != 0),
        slot_floats_(cache_.slot_floats()) {
    check(settings.cells == FLOATS, "the delta rule needs caches of float32");
    check(states_at_ >= 0 && states_at_ % 64 == 0 && states_at_ < int64_t{1} << 46, "states are not aligned to 64 bytes");
    job_.key_heads = positive(node, "key_heads");
    job_.value_heads = positive(node, "value_heads");
    job_.key_dim = positive(node, "key_dim");
    job_.value_dim = positive(node, "value_dim");
    job_.taps = positive(node, "taps");
    job_.epsilon = node.real("epsilon");
    job_.space = node.integer("space") != 0;
    check(job_.key_dim <= MAX_HEAD && job_.value_dim <= MAX_HEAD && job_.taps <= 16 && job_.value_heads <= 4096 &&
              job_.value_heads % job_.key_heads == 0, "the sizes of the delta rule are out of range");
    check(cache_.size() == job_.record_size(), "a record has another size");
    job_.width = (job_.value_dim + 15) / 16 * 16;
    const float *weights = node.floats(3, job_.mixed() * job_.taps, "the weights of a convolution have another size");
    job_.decay = node.floats(4, job_.value_heads, "decays have another size");
    job_.bias = node.floats(5, job_.value_heads, "biases have another size");
    if (job_.space) job_.skip = node.floats(6, job_.value_heads, "there is a factor for each head");
    else job_.norm = node.floats(6, job_.value_dim, "the norm has another size");
    job_.taps_bias = node.floats(7, job_.mixed(), "the biases of a convolution have another size");
    check(weights && job_.decay && job_.bias && (job_.norm || job_.skip), "the delta rule has no weights");
    for (int64_t tap = 0; tap < job_.taps; tap++)
      for (int64_t i = 0; i < job_.mixed(); i++) weights_.push_back(weights[i * job_.taps + tap]);
  }

  void run(const Call &call) const {
    const Tensor x = call.input(0), tokens = call.input(1), paths = call.input(2);
    const int64_t count = cache_.checked(tokens), before = job_.taps - 1, heads = job_.value_heads;
    check(x.type == ort::FLOAT && x.size() == count * job_.columns(), "x has another size");
    const std::vector<int64_t> parents = cache_.ancestors(tokens, paths, std::max<int64_t>(before, 1));
    std::vector<Run> runs = read_runs(tokens, paths, parents);
    Scratch memory(Scratch::bytes_of<float>(count * job_.mixed()) + 2 * Scratch::bytes_of<float *>(count * job_.taps) + 64);
    DeltaRule job = job_;
    job.weights = weights_.data();
    job.x = x.floats();
    job.y = call.output<float>(0, {count, job.values()});
    job.convolved = memory.take<float>(count * job.mixed());
    float **records = memory.take<float *>(count);
    const float **earlier = memory.take<const float *>(count * before);
    job.records = records, job.before = earlier;
    for (const Run &run : runs)
      for (int64_t i = 0; i < run.count; i++) {
        const int64_t t = run.row + i;
        records[t] = record(run, run.slot + i);
        for (int64_t d = 0; d < before; d++) {
          const int64_t slot = parents[static_cast<size_t>(t * before + d)];
          if (slot < 0) earlier[t * before + d] = nullptr;
          else if (slot < run.slot) earlier[t * before + d] = record(run, slot);
          else earlier[t * before + d] = job.x + (run.row + slot - run.slot) * job.columns();
        }
      }
    call.parallel(count, count < 2 ? 1 : settings_.threads, [&](int64_t first, int64_t last) { settings_.kernels->mix(job, first, last); });
    const int64_t units = static_cast<int64_t>(runs.size()) * heads;
    std::atomic<bool> fits{true};
    call.parallel(units, units, [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; unit++)
        if (!advance(job, runs[static_cast<size_t>(unit / heads)], unit % heads)) fits = false;
    });
    check(fits, "there is not enough memory for the states of a tree");
    for (const Run &run : runs) run.finish(keeps_);
  }

 private:
  struct Header {
    int64_t after[2];   // number of slots before each state
    int64_t committed;  // index of the state that no draft changes
  };

  // The start of a state that no earlier token of the call has: `after` slots, and then the slots of the path.
  struct Start {
    int64_t parent;             // its row in the run; -1: the state comes from slots before the call
    int64_t after;              // number of first slots that precede it
    std::vector<int64_t> more;  // further slots that precede it
  };

  // Consecutive tokens of one cache.
  struct Run {
    char *cache;
    Header *header;
    int64_t row, count, slot;
    bool chain;                 // whether each token follows the one in the slot before it
    std::vector<Start> starts;  // of each token
    int64_t source, after, target;  // the state that is read, its slots, and the state after the last token of a chain

    void finish(bool keeps) const {
      if (keeps) header->committed = source, header->after[source] = copies(keeps) ? slot + count : slot;
      if (chain) header->after[target] = slot + count;
    }
    // Whether the tokens are a prompt piece. None of them is rejected, so a draft needs no state before them.
    bool copies(bool keeps) const { return keeps && chain && count > MANY; }
  };

  float *record(const Run &run, int64_t slot) const {
    return reinterpret_cast<float *>(run.cache) + cache_.first_float() + slot * slot_floats_;
  }
  float *state(const Run &run, int64_t which, int64_t head) const {
    return reinterpret_cast<float *>(reinterpret_cast<char *>(run.header) + 64) + (which * job_.value_heads + head) * job_.state_size();
  }

  // The runs of a call. States are dropped if the tokens before them are not the tokens before the run.
  std::vector<Run> read_runs(const Tensor &tokens, const Tensor &paths, const std::vector<int64_t> &parents) const {
    std::vector<Run> runs;
    const int64_t *row = static_cast<const int64_t *>(tokens.data), most = std::max<int64_t>(job_.taps - 1, 1);
    const int32_t *path = static_cast<const int32_t *>(paths.data);
    for (int64_t t = 0; t < tokens.shape[0]; t++, row += 5, path += paths.shape[1]) {
      char *cache = reinterpret_cast<char *>(row[0]);
      if (!t || cache != runs.back().cache) {
        runs.push_back({cache, reinterpret_cast<Header *>(cache + states_at_), t, 0, row[2], true, {}, 0, 0, 0});
      }
      Run &run = runs.back();
      check(row[2] == run.slot + run.count, "the slots of a sequence do not follow each other");
      check(row[3] + row[4] > 0 && row[3] + row[4] <= row[2] + 1, "a token sees later slots");
      const int64_t parent = parents[static_cast<size_t>(t * most)];
      Start start = {parent >= run.slot ? parent - run.slot : -1, std::min(row[3], run.slot), {}};
      check(parent < row[2], "a token follows a later one");
      for (int64_t i = 0; start.parent < 0 && i < row[4] && path[i] < run.slot; i++) {
        cache_.checked_slot(path[i]);
        if (path[i] == start.after && start.more.empty()) start.after++;
        else start.more.push_back(path[i]);
      }
      run.chain = run.chain && row[3] + row[4] == row[2] + 1;
      run.starts.push_back(start);
      run.count++;
    }
    for (Run &run : runs) plan(run);
    return runs;
  }

  // Choose the states of a run. The states that the run writes hold nothing until it ends.
  void plan(Run &run) const {
    int64_t least = run.slot;
    for (const Start &start : run.starts)
      if (start.parent < 0) least = std::min(least, start.after);
    check(!keeps_ || least == run.slot, "a token does not see all tokens before the call");
    int64_t *after = run.header->after;
    const int64_t committed = run.header->committed != 0;
    const auto usable = [&](int64_t which) { return after[which] <= least ? after[which] : 0; };
    for (int64_t which : {0, 1})
      if (after[which] < 0 || after[which] > run.slot) after[which] = 0;
    run.source = usable(1 - committed) > usable(committed) ? 1 - committed : committed;
    run.after = usable(run.source);
    run.target = 1 - (keeps_ ? run.source : committed);
    if (keeps_) after[run.source] = 0;
    if (run.chain || (!keeps_ && !run.after)) after[run.target] = 0;
  }

  // Compute the tokens of a run for one head. Returns false if there is no memory for a tree.
  bool advance(const DeltaRule &job, const Run &run, int64_t head) const {
    float *target = state(run, run.target, head), *to = keeps_ ? state(run, run.source, head) : target;
    const float *from = state(run, run.source, head);
    const auto size = static_cast<size_t>(job.state_size());
    // Steps over some slots: slots of the call's tokens from a row on or, if the row is -1, slots of earlier tokens.
    const auto step = [&](int64_t row, int64_t slot, int64_t count, float *into) {
      if (count <= 0) return;
      settings_.kernels->step(job, row, record(run, slot), slot_floats_, count, head, from, into);
      from = into;
    };
    if (!run.after) std::fill(to, to + size, 0.f), from = to;
    int64_t after = run.after;
    if (keeps_ || run.chain) step(-1, after, run.slot - after, to), after = run.slot;
    if (run.chain) {
      step(run.row, run.slot, run.count, target);
      if (run.copies(keeps_)) std::copy(target, target + size, to);
      return true;
    }
    const std::unique_ptr<float[]> states(new (std::nothrow) float[size * static_cast<size_t>(run.count)]);
    if (!states) return false;
    const float *base = from;
    for (int64_t i = 0; i < run.count; i++) {
      const Start &start = run.starts[static_cast<size_t>(i)];
      float *own = states.get() + size * static_cast<size_t>(i);
      from = start.parent < 0 ? base : states.get() + size * static_cast<size_t>(start.parent);
      if (start.parent < 0) step(-1, after, start.after - after, own);
      for (int64_t slot : start.more) step(-1, slot, 1, own);
      step(run.row + i, run.slot + i, 1, own);
    }
    return true;
  }

  const Settings settings_ = settings;
  DeepCache cache_;
  int64_t states_at_;
  bool keeps_;
  int64_t slot_floats_;
  DeltaRule job_ = {};
  std::vector<float> weights_;
};

// logits [T, V], ids [V] int64 or [0] -> ids [T, k] int64, log-probabilities [T, k]. Without `ids`, columns are returned in their place.
class Choose {
 public:
  static constexpr const char *name = "TopK";
  static constexpr ort::Type outputs[] = {ort::INT64, ort::FLOAT};
  explicit Choose(const Node &node) : k_(positive(node, "k")) {
    const Tensor ids = node.constant(1);
    check(ids.type == ort::INT64 || ids.size() == 0, "ids are int64");
    columns_ = ids.size();
    ids_ = columns_ ? static_cast<const int64_t *>(ids.data) : nullptr;
  }

  void run(const Call &call) const {
    const Tensor logits = call.input(0);
    check(logits.type == ort::FLOAT && logits.shape.size() == 2, "logits are [T, V] float32");
    const int64_t rows = logits.shape[0], columns = logits.shape[1];
    check(columns >= k_ && (!ids_ || columns == columns_), "logits have another width");
    int64_t *found = call.output<int64_t>(0, {rows, k_});
    const TopK job = {logits.floats(), columns, k_, found, call.output<float>(1, {rows, k_})};
    call.parallel(rows, settings_.threads, [&](int64_t first, int64_t last) { settings_.kernels->top(job, first, last); });
    for (int64_t i = 0; ids_ && i < rows * k_; i++) found[i] = ids_[found[i]];
  }

 private:
  const Settings settings_ = settings;
  int64_t k_, columns_;
  const int64_t *ids_;
};

ort::Status *status_of(const std::string &why) {
  return ort::call<ort::CREATE_STATUS>(table, ort::INVALID_ARGUMENT, why.c_str());
}

// Do some work, and return an exception as a status.
template <typename Work> ort::Status *guarded(const Work &work) {
  try {
    work();
    return nullptr;
  } catch (const Refused &refused) {
    return status_of(refused.why);
  } catch (const std::exception &error) {
    return status_of(error.what());
  }
}

// An operator for ONNX Runtime. A node's inputs form a single variadic input, so that their types may differ.
template <typename Operator> const ort::CustomOp *custom_op() {
  static ort::CustomOp op = [] {
    ort::CustomOp own = {};
    own.version = ort::VERSION;
    own.name = [](const ort::CustomOp *) { return Operator::name; };
    own.provider = [](const ort::CustomOp *) -> const char * { return nullptr; };
    own.input_type = [](const ort::CustomOp *, size_t) { return static_cast<ort::Type>(0); };
    own.output_type = [](const ort::CustomOp *, size_t index) { return Operator::outputs[index]; };
    own.num_inputs = [](const ort::CustomOp *) -> size_t { return 1; };
    own.num_outputs = [](const ort::CustomOp *) { return sizeof Operator::outputs / sizeof Operator::outputs[0]; };
    own.input_kind = [](const ort::CustomOp *, size_t) { return 2; };
    own.output_kind = own.input_memory = [](const ort::CustomOp *, size_t) { return 0; };
    own.least_inputs = own.least_outputs = own.one_output_type = own.first_version = [](const ort::CustomOp *) { return 1; };
    own.one_input_type = [](const ort::CustomOp *) { return 0; };
    own.last_version = [](const ort::CustomOp *) { return 1 << 30; };
    own.create_with_status = [](const ort::CustomOp *, const ort::Table *, const ort::Info *info, void **made) {
      return guarded([&] { *made = new Operator(Node(info)); });
    };
    own.compute_with_status = [](void *made, ort::Context *context) {
      return guarded([&] { static_cast<const Operator *>(made)->run(Call(context)); });
    };
    own.destroy = [](void *made) { delete static_cast<Operator *>(made); };
    return own;
  }();
  return &op;
}

const Kernels *const all_kernels[] = {&avx512_kernels, &avx2vnni_kernels, &avx2_kernels, &i8mm_kernels, &neon_kernels, &scalar_kernels};

// The kernels with this name, or the fastest kernels if it is empty; null if this processor does not support them.
const Kernels *find_kernels(const char *name) {
  for (const Kernels *one : all_kernels)
    if (one->supported() && (!*name || !strcmp(name, one->name))) return one;
  return nullptr;
}

}  // namespace
}  // namespace eesd

extern "C" {

// Configure the nodes of sessions that are made from now on: the kernels (a name, or "" for the fastest), the threads of the session,
// whether activations are rounded to 8 bits for products with levels, and the Cells of caches as a number. Files of weights of at most
// `most_copied` bytes are copied to large pages. Returns the kernels' name; null if this processor does not support them.
EESD_EXPORT const char *eesd_configure(const char *name, int64_t threads, int int8, int cells, int64_t most_copied) {
  const eesd::Kernels *found = eesd::find_kernels(name);
  if (found) eesd::settings = {found, threads < 1 ? 1 : threads, int8 != 0, static_cast<eesd::Cells>(cells), most_copied};
  return found ? found->name : nullptr;
}

EESD_EXPORT ort::Status *RegisterCustomOps(ort::Options *options, const ort::ApiBase *base) {
  eesd::table = base->get_table(ort::VERSION);
  if (!eesd::table) return nullptr;  // with an older ONNX Runtime, there are no operators
  if (!eesd::settings.kernels) return eesd::status_of("eesd_configure has chosen no kernels");
  static ort::Domain *domain = [] {  // shared by all sessions
    ort::Domain *made = nullptr;
    bool wrong = eesd::failed(ort::call<ort::CREATE_DOMAIN>(eesd::table, "eesd", &made));
    for (const ort::CustomOp *op :
         {eesd::custom_op<eesd::Embed>(), eesd::custom_op<eesd::Multiply>(), eesd::custom_op<eesd::MultiplyHeads>(), eesd::custom_op<eesd::Mixture>(), eesd::custom_op<eesd::Attend>(),
          eesd::custom_op<eesd::Choose>(), eesd::custom_op<eesd::WriteState>(), eesd::custom_op<eesd::CarryState>(),
          eesd::custom_op<eesd::ParentState>(), eesd::custom_op<eesd::Convolve>(), eesd::custom_op<eesd::Rule>()})
      wrong = wrong || eesd::failed(ort::call<ort::ADD_TO_DOMAIN>(eesd::table, made, op));
    return wrong ? nullptr : made;
  }();
  if (!domain) return eesd::status_of("the operators cannot be registered");
  return ort::call<ort::ADD_DOMAIN>(eesd::table, options, domain);
}
}
