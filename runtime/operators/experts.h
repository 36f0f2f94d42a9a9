// The choice of a token's experts, and the weighted sum of their results.

// Find the experts with the k largest logits of each row, and their weights.
static void route(const Routing &job, int64_t first_row, int64_t last_row) {
  top(job.top, first_row, last_row);
  const int64_t k = job.top.k;
  for (int64_t row = first_row; row < last_row; row++) {
    float *weights = job.top.logprobs + row * k;
    for (int64_t i = 0; i < k; i += 16) {
      float lane[16];
      store(lane, exponential(load_some(weights + i, least(16, k - i))));
      for (int64_t j = i; j < least(i + 16, k); j++) weights[j] = lane[j - i];
    }
    float sum = 0;
    for (int64_t i = 0; i < k; i++) sum += weights[i];
    for (int64_t i = 0; job.normed && i < k; i++) weights[i] /= sum;
    for (int64_t i = 0; job.factors && i < k; i++) weights[i] *= job.factors[job.top.found[row * k + i]];
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
