// Access to ONNX Runtime for the operators: nodes while a session is made, calls, and errors as status values.
#pragma once
#include "kernels.h"
#include "ort_abi.h"

#include <initializer_list>
#include <new>
#include <string>
#include <vector>

namespace eesd {

struct Refused {  // thrown, and returned to ONNX Runtime as a status
  std::string why;
};

inline void check(bool fine, const char *why) {
  if (!fine) throw Refused{why};
}

inline const ort::Table *table;  // the same in all sessions of a process

inline bool failed(ort::Status *status) {
  if (status) reinterpret_cast<void (*)(ort::Status *)>(table->function[ort::RELEASE_STATUS])(status);
  return status != nullptr;
}

// A tensor of a call, or a constant.
struct Tensor {
  void *data = nullptr;
  std::vector<int64_t> shape;
  ort::Type type = ort::FLOAT;

  int64_t size() const {
    int64_t count = 1;
    for (int64_t dimension : shape) count *= dimension;
    return count;
  }
  const float *floats() const { return static_cast<const float *>(data); }
};

inline Tensor read(const ort::Value *value) {
  Tensor tensor;
  ort::Shape *shape = nullptr;
  size_t count = 0;
  check(!failed(ort::call<ort::SHAPE>(table, value, &shape)), "a tensor has no shape");
  bool wrong = failed(ort::call<ort::NUM_DIMENSIONS>(table, static_cast<const ort::Shape *>(shape), &count));
  tensor.shape.resize(count);
  wrong |= failed(ort::call<ort::DIMENSIONS>(table, static_cast<const ort::Shape *>(shape), tensor.shape.data(), count));
  wrong |= failed(ort::call<ort::ELEMENT_TYPE>(table, static_cast<const ort::Shape *>(shape), &tensor.type));
  reinterpret_cast<void (*)(ort::Shape *)>(table->function[ort::RELEASE_SHAPE])(shape);
  wrong |= failed(ort::call<ort::DATA>(table, const_cast<ort::Value *>(value), &tensor.data));
  check(!wrong, "a tensor cannot be read");
  return tensor;
}

// A node, while a session is made.
class Node {
 public:
  explicit Node(const ort::Info *info) : info_(info) {}

  int64_t integer(const char *name) const {
    int64_t value = 0;
    check(!failed(ort::call<ort::INT_ATTRIBUTE>(table, info_, name, &value)), name);
    return value;
  }
  float real(const char *name) const {
    float value = 0;
    check(!failed(ort::call<ort::FLOAT_ATTRIBUTE>(table, info_, name, &value)), name);
    return value;
  }
  std::vector<int64_t> integers(const char *name) const {
    size_t count = 0;
    check(!failed(ort::call<ort::INT_ARRAY_ATTRIBUTE>(table, info_, name, static_cast<int64_t *>(nullptr), &count)), name);
    std::vector<int64_t> values(count);
    check(!failed(ort::call<ort::INT_ARRAY_ATTRIBUTE>(table, info_, name, values.data(), &count)), name);
    return values;
  }
  Tensor constant(size_t input) const {
    int is_constant = 0;
    const ort::Value *value = nullptr;
    const bool wrong = failed(ort::call<ort::CONSTANT_INPUT>(table, info_, input, &is_constant, &value));
    check(!wrong && is_constant && value, "a weight must be a constant");
    return read(value);
  }
  // A constant input of `count` floats; null if it is empty.
  const float *floats(size_t input, int64_t count, const char *why) const {
    const Tensor tensor = constant(input);
    check(tensor.type == ort::FLOAT && (tensor.size() == count || tensor.size() == 0), why);
    return tensor.size() ? tensor.floats() : nullptr;
  }

 private:
  const ort::Info *info_;
};

// A call of a node.
class Call {
 public:
  explicit Call(ort::Context *context) : context_(context) {}

  Tensor input(size_t index) const {
    const ort::Value *value = nullptr;
    const bool wrong = failed(ort::call<ort::INPUT>(table, static_cast<const ort::Context *>(context_), index, &value));
    check(!wrong && value, "an input is missing");
    return read(value);
  }
  template <typename T> T *output(size_t index, std::initializer_list<int64_t> shape) const {
    ort::Value *value = nullptr;
    void *data = nullptr;
    bool wrong = failed(ort::call<ort::OUTPUT>(table, context_, index, shape.begin(), shape.size(), &value));
    wrong = wrong || failed(ort::call<ort::DATA>(table, value, &data));
    check(!wrong, "an output cannot be allocated");
    return static_cast<T *>(data);
  }
  // Divide 0 to count - 1 into at most `parts` parts, and call work(first, last) for each, on the session's threads. Parts may run in
  // parallel or one after another, and must not wait for each other.
  template <typename Work> void parallel(int64_t count, int64_t parts, const Work &work) const {
    parts = parts < count ? parts : count;
    if (parts <= 1) {
      if (count > 0) work(int64_t{0}, count);
      return;
    }
    struct Job {
      const Work *work;
      int64_t count, parts;
    } job = {&work, count, parts};
    void (*run)(void *, size_t) = [](void *data, size_t part) {
      const Job &own = *static_cast<Job *>(data);
      const int64_t at = static_cast<int64_t>(part);
      (*own.work)(own.count * at / own.parts, own.count * (at + 1) / own.parts);
    };
    const auto total = static_cast<size_t>(parts);
    check(!failed(ort::call<ort::PARALLEL_FOR>(table, static_cast<const ort::Context *>(context_), run, total, size_t{0},
                                               static_cast<void *>(&job))),
          "the session's threads cannot be used");
  }

 private:
  ort::Context *context_;
};

// Memory for intermediate results of the thread that runs a node. It is kept for the next call.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    thread_local struct Memory {
      void *data = nullptr;
      size_t bytes = 0;
      ~Memory() { release(); }
      void release() { ::operator delete(data, std::align_val_t(64)); }
    } memory;
    if (memory.bytes < bytes) {
      memory.release();
      memory.bytes = bytes;
      memory.data = ::operator new(bytes, std::align_val_t(64), std::nothrow);
      if (!memory.data) memory.bytes = 0;
      check(memory.data, "there is not enough memory for a call of this size");
    }
    next_ = static_cast<char *>(memory.data);
  }
  template <typename T> T *take(int64_t count) {
    T *own = reinterpret_cast<T *>(next_);
    next_ += bytes_of<T>(count);
    return own;
  }
  template <typename T> static size_t bytes_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char *next_;
};

}  // namespace eesd
