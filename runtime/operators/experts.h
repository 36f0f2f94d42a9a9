// The choice of a token's experts, and the weighted sum of their results.

// Compute the scores of all experts of a row.
static void score(const Routing &job, const float *logits, float *scores) {
  const int64_t columns = job.top.columns;
  int64_t first;
  float normalizer = 0;
  if (job.scores == SOFTMAX) top({logits, columns, 1, &first, &normalizer}, 0, 1);
  const float most = job.scores == SOFTMAX ? logits[first] : 0;
  for (int64_t i = 0; i < columns; i += 16) {
    const int64_t count = least(16, columns - i);
    const Floats x = load_some(logits + i, count);
    if (job.scores == SOFTMAX) store_some(scores + i, count, exponential(add(sub(x, all(most)), all(normalizer))));
    else store_some(scores + i, count, div(all(1.f), add(all(1.f), exponential(sub(all(0), x)))));
  }
}

// Replace the ranks of experts in groups that a row does not use by minus infinity. `sums` and `found` have room for all experts.
static void keep_groups(const Routing &job, float *ranks, float *sums, float *best, int64_t *found) {
  const int64_t size = job.top.columns / job.groups;
  for (int64_t group = 0; group < job.groups; group++) {
    find_largest(ranks + group * size, {nullptr, size, job.group_best, nullptr, nullptr}, best, found);
    sums[group] = 0;
    for (int64_t i = 0; i < job.group_best; i++) sums[group] += best[i];
  }
  find_largest(sums, {nullptr, job.groups, job.used_groups, nullptr, nullptr}, best, found);
  for (int64_t group = 0; group < job.groups; group++) {
    bool used = false;
    for (int64_t i = 0; i < job.used_groups; i++) used |= found[i] == group;
    for (int64_t i = group * size; !used && i < (group + 1) * size; i++) ranks[i] = -INFINITY;
  }
}

// Find the experts of a row by their scores and biases, and store their scores as weights.
static void choose(const Routing &job, int64_t row, float *weights, int64_t *found) {
  const int64_t columns = job.top.columns;
  float *scores = job.memory + row * 4 * columns, *ranks = scores + columns, *sums = ranks + columns, *best = sums + columns;
  score(job, job.top.logits + row * columns, scores);
  for (int64_t i = 0; i < columns; i++) ranks[i] = job.bias ? scores[i] + job.bias[i] : scores[i];
  if (job.groups > 1) keep_groups(job, ranks, sums, best, job.columns + row * columns);
  find_largest(ranks, job.top, weights, found);
  for (int64_t i = 0; i < job.top.k; i++) weights[i] = scores[found[i]];
}

// The share of a row's logit `most` among the logits near it, without those of the first `chosen` experts.
static float near_share(const Routing &job, const float *logits, float most, int64_t chosen, const int64_t *found) {
  float sum = 0;
  for (int64_t i = 0; i < job.top.columns; i += 16) {
    const int64_t count = least(16, job.top.columns - i);
    float lane[16];
    store(lane, exponential(sub(load_some(logits + i, count), all(most))));
    for (int64_t j = 0; j < count; j++) {
      const float x = logits[i + j], absolute = x < 0 ? -x : x;
      bool counts = !((most - x) / (absolute > most ? absolute : most) > job.margin);
      for (int64_t before = 0; before < chosen; before++) counts &= found[before] != i + j;
      if (counts) sum += lane[j];
    }
  }
  return 1 / sum;
}

// Find the experts of each row, and their weights.
static void route(const Routing &job, int64_t first_row, int64_t last_row) {
  const bool by_logits = job.by_logits();
  if (by_logits) top(job.top, first_row, last_row);
  const int64_t k = job.top.k;
  for (int64_t row = first_row; row < last_row; row++) {
    float *weights = job.top.logprobs + row * k;
    if (!by_logits) choose(job, row, weights, job.top.found + row * k);
    if (job.scores == SPARSEMIXER) {
      const int64_t *found = job.top.found + row * k;
      const float *logits = job.top.logits + row * job.top.columns;
      for (int64_t i = 0; i < k; i++) weights[i] = near_share(job, logits, logits[found[i]], i, found);
    }
    for (int64_t i = 0; job.scores == SOFTMAX && by_logits && i < k; i += 16)
      store_some(weights + i, least(16, k - i), exponential(load_some(weights + i, least(16, k - i))));
    float sum = 0;
    for (int64_t i = 0; i < k; i++) sum += weights[i];
    sum += job.epsilon;
    for (int64_t i = 0; job.normed && i < k; i++) weights[i] /= sum;
    for (int64_t i = 0; job.factors && i < k; i++) weights[i] *= job.factors[job.top.found[row * k + i]];
    for (int64_t i = 0; i < k; i++) weights[i] *= job.scale;
  }
}

// sum = fma(weight, y of the expert, sum), in the order of the experts. The residual is added at the end.
static void combine(const Combination &job, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; row++)
    for (int64_t column = 0; column < job.columns; column += 16) {
      const int64_t count = least(16, job.columns - column);
      Floats sum = all(0);
      for (int64_t i = row * job.used; i < (row + 1) * job.used; i++)
        sum = fma(all(job.weights[i]), load_some(job.experts + job.rows[i] * job.columns + column, count), sum);
      if (job.residual) sum = add(sum, load_some(job.residual + row * job.columns + column, count));
      store_some(job.y + row * job.columns + column, count, sum);
    }
}
