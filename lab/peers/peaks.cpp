// Peaks of the machine, with which passes are compared: reads of memory, and products of 8-bit integers in registers.
//
//     peaks THREADS    # writes JSON: seconds of each read of 256 MiB, and by kernels the products in a second

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBytes = 1 << 28;   // larger than any cache
constexpr int kStreams = 4;           // one stream does not fill the queues of the memory
constexpr int kReads = 4;
constexpr int64_t kRounds = 1000000;
constexpr int kSums = 12;             // more than the products that are under way at a time

double seconds(int threads, const std::function<void(int)>& work) {
    const auto started = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(work, thread);
    work(0);
    for (auto& other : others) other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

#if defined(__x86_64__)

// The compiler must treat the value as new: if not, it would compute equal sums only once.
template <class Vector>
void renew(Vector& value) {
    asm volatile("" : "+x"(value));
}
template <class Vector, int count>
void renew(Vector (&values)[count]) {
#pragma GCC unroll 16
    for (auto& value : values) renew(value);
}

__attribute__((target("avx2"))) void read(const char* from, int64_t bytes) {
    __m256i sums[kStreams] = {};
    const int64_t part = bytes / kStreams / 64 * 64;
    for (int64_t at = 0; at < part; at += 64) {
#pragma GCC unroll 16
        for (int stream = 0; stream < kStreams; stream++) {
            const auto* line = reinterpret_cast<const __m256i*>(from + stream * part + at);
            sums[stream] = _mm256_add_epi64(sums[stream], _mm256_add_epi64(_mm256_loadu_si256(line), _mm256_loadu_si256(line + 1)));
        }
    }
    renew(sums);
}

__attribute__((target("avx512f,avx512vnni"))) void multiply_avx512() {
    __m512i sums[kSums] = {}, left = _mm512_set1_epi8(3), right = left;
    renew(sums);
    for (int64_t round = 0; round < kRounds; round++) {
#pragma GCC unroll 16
        for (auto& sum : sums) {
            renew(left);
            sum = _mm512_dpbusd_epi32(sum, left, right);
        }
    }
    renew(sums);
}

__attribute__((target("avx2"))) void multiply_avx2() {
    __m256i sums[kSums] = {}, left = _mm256_set1_epi8(3), right = left;
    const __m256i ones = _mm256_set1_epi16(1);
    renew(sums);
    for (int64_t round = 0; round < kRounds; round++) {
#pragma GCC unroll 16
        for (auto& sum : sums) {
            renew(left);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(left, right), ones));
        }
    }
    renew(sums);
}

#else

void read(const char* from, int64_t bytes) {
    volatile uint64_t kept = 0;
    uint64_t sum = 0;
    for (int64_t at = 0; at < bytes / 8; at++) sum += reinterpret_cast<const uint64_t*>(from)[at];
    kept = sum;
}

#endif

}  // namespace

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]);
    const int64_t part = kBytes / threads;
    std::vector<char> memory(kBytes, 1);
    std::string reads, products;
    for (int i = 0; i < kReads; i++) {
        const double taken = seconds(threads, [&](int thread) { read(memory.data() + thread * part, part); });
        reads += (i ? ", " : "") + std::to_string(taken);
    }
#if defined(__x86_64__)
    const auto note = [&](const char* kernels, void (*multiply)(), int lanes) {
        const double per_second = double(kRounds) * kSums * lanes * threads / seconds(threads, [&](int) { multiply(); });
        products += (products.empty() ? "\"" : ", \"") + std::string(kernels) + "\": " + std::to_string(per_second);
    };
    if (__builtin_cpu_supports("avx512vnni")) note("avx512", multiply_avx512, 64);
    if (__builtin_cpu_supports("avx2")) note("avx2", multiply_avx2, 32);
#endif
    std::printf("{\"reads\": [%s], \"products\": {%s}}\n", reads.c_str(), products.c_str());
}
