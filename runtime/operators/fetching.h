// Choose how products of one row fetch levels ahead (fetch_ahead in levels.h): a line of the next page for each block, or whole
// blocks. Results have the same bits either way. The processor determines the faster way: fetching whole blocks takes 1.3 times as long on
// a Zen 4, but 0.6 times as long on a Zen 3. So a process times its first products, with a random choice for each, and then uses the faster
// way.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include "kernels.h"

namespace eesd {

class Fetching {
 public:
  bool whole() const { return whole_; }

  // Call work(whole), which reads `bytes` bytes of levels. With 0 bytes, the call is not timed.
  template <typename Work> void run(int64_t bytes, const Work &work) {
    if (bytes < LEAST || decided_) return work(whole());
    const bool whole = (count_.fetch_add(1) * 2654435761U >> 31) != 0;  // a hash, because the same products recur in each pass
    const auto started = std::chrono::steady_clock::now();
    work(whole);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    add(whole, took.count() / static_cast<double>(bytes));
  }

 private:
  static constexpr int64_t LEAST = 1 << 17;  // bytes; for fewer bytes, threads take most of the time
  static constexpr uint32_t COLD = 256;      // number of first products, whose weights may still come from the disk
  static constexpr size_t TRIALS = 128;

  void add(bool whole, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (count_ <= COLD || decided_) return;
    found_[whole].push_back(seconds);
    if (std::min(found_[0].size(), found_[1].size()) < TRIALS) return;
    whole_ = median(found_[1]) < median(found_[0]);
    decided_ = true;
  }

  static double median(std::vector<double> &values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  std::mutex mutex_;
  std::atomic<uint32_t> count_{0};
  std::atomic<bool> whole_{false}, decided_{false};
  std::vector<double> found_[2];  // seconds per byte, by `whole`
};

inline Fetching fetching;

}  // namespace eesd
