// TensorRT and CUDA for a C++ program on a machine without a GPU. TensorRT's calls go through a socket, the standard input, to a
// Python process, which has the fake of the Python API (fake_tensorrt.py) and runs the real graphs.
//
// Mistakes that a GPU may forgive are errors here. The host cannot touch device memory: an address there is a reserved page, and
// the bytes lie in a file that both processes map. Work in a stream begins when the host waits for it. Memory that is new,
// freed, or will be written holds garbage. What is left at the end aborts the program.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "NvInfer.h"

struct CUstream_st {
  std::deque<std::function<void()>> work;
};

namespace {

constexpr int GARBAGE = 0xFF;  // NaN of every float
constexpr size_t ALIGNMENT = 256;

[[noreturn]] void stop(const char *why) {
  std::fprintf(stderr, "fake.cpp: %s\n", why);
  std::fflush(stderr);
  std::_Exit(99);
}
void expect(bool holds, const char *why) {
  if (!holds) stop(why);
}

struct Machine {
  int left = 0;  // objects and memory that are not released yet
  char *reserved = nullptr, *bytes = nullptr;
  size_t size = 0, used = 0;
  long long there = 0;
  std::map<char *, size_t> sizes;
  cudaStream_t stream = nullptr;

  Machine() {
    const std::string answer = ask("memory");  // where the Python process has the bytes, and their file
    there = std::stoll(answer);
    const int file = open(answer.c_str() + answer.find(' ') + 1, O_RDWR);
    struct stat info {};
    expect(file >= 0 && fstat(file, &info) == 0, "there is no device memory");
    size = info.st_size;
    reserved = static_cast<char *>(mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    bytes = static_cast<char *>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  }
  ~Machine() { expect(left == 0, "something is not released"); }

  bool holds(const void *address, size_t count) const {
    const auto at = static_cast<const char *>(address);
    return at >= reserved && at + count <= reserved + used;
  }
  char *at(const void *address) const { return bytes + (static_cast<const char *>(address) - reserved); }

  std::string ask(const std::string &question) const {
    const std::string line = question + "\n";
    for (size_t sent = 0; sent < line.size();) {
      const ssize_t count = write(STDIN_FILENO, line.data() + sent, line.size() - sent);
      expect(count > 0, "the Python process is gone");
      sent += count;
    }
    std::string found;
    for (char letter; expect(read(STDIN_FILENO, &letter, 1) == 1, "the Python process is gone"), letter != '\n';) found += letter;
    return found;
  }
};

Machine &machine() {
  static Machine made;
  return made;
}

// An object of the Python process, by its number there.
struct Remote {
  std::string id;
  explicit Remote(std::string number) : id(std::move(number)) { machine().left++; }
  ~Remote() { machine().left--; }
  std::string ask(const std::string &method, const std::string &arguments = "") const {
    return machine().ask(method + " " + id + " " + arguments);
  }
  bool yes(const std::string &method, const std::string &arguments) const { return ask(method, arguments) == "True"; }
};
struct Context : nvinfer1::IExecutionContext, Remote {
  using Remote::Remote;
};
struct Engine : nvinfer1::ICudaEngine, Remote {
  using Remote::Remote;
  mutable std::string alias;
};
struct Runtime : nvinfer1::IRuntime, Remote {
  Runtime(nvinfer1::ILogger &given) : Remote("0"), logger(given) {}
  nvinfer1::ILogger &logger;
};

std::string address(const void *memory) {
  return std::to_string(machine().there + (static_cast<const char *>(memory) - machine().reserved));
}
void finish() {  // freeing waits for all work
  if (machine().stream) cudaStreamSynchronize(machine().stream);
}
const Context &of(const nvinfer1::IExecutionContext *context) { return *static_cast<const Context *>(context); }
const Engine &of(const nvinfer1::ICudaEngine *engine) { return *static_cast<const Engine *>(engine); }

}  // namespace

namespace nvinfer1 {

IRuntime *createInferRuntime(ILogger &logger) noexcept { return new Runtime(logger); }

ICudaEngine *IRuntime::deserializeCudaEngine(void const *blob, std::size_t size) noexcept {
  std::string plan = "x";
  for (size_t i = 0; i < size; i++) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char *>(blob)[i]);
    plan += digits;
  }
  const auto &runtime = *static_cast<Runtime *>(this);
  const std::string answer = runtime.ask("load", plan);
  if (answer[0] != '!') return new Engine(answer);
  runtime.logger.log(ILogger::Severity::kERROR, answer.c_str() + 1);
  return nullptr;
}

int32_t ICudaEngine::getNbIOTensors() const noexcept { return std::stoi(of(this).ask("num_io_tensors")); }
int64_t ICudaEngine::getDeviceMemorySizeV2() const noexcept { return std::stoll(of(this).ask("device_memory_size_v2")); }
Dims ICudaEngine::getTensorShape(char const *tensorName) const noexcept {
  Dims shape{};
  const std::string answer = of(this).ask("get_tensor_shape", tensorName);  // such as (1, -1)
  for (size_t at = 0; (at = answer.find_first_of("-0123456789", at)) != std::string::npos; at = answer.find(',', at))
    shape.d[shape.nbDims++] = std::strtoll(answer.c_str() + at, nullptr, 10);
  return shape;
}
DataType ICudaEngine::getTensorDataType(char const *tensorName) const noexcept {
  const std::string answer = of(this).ask("tensor", tensorName);  // mode and type
  return static_cast<DataType>(std::stoi(answer.substr(answer.find(' '))));
}
TensorIOMode ICudaEngine::getTensorIOMode(char const *tensorName) const noexcept {
  const std::string name = tensorName;
  const bool is_name = std::all_of(name.begin(), name.end(), [](unsigned char one) { return std::isalnum(one) || one == '_'; });
  if (name.empty() || !is_name) return TensorIOMode::kNONE;  // no engine has it, and the socket could not carry it
  return static_cast<TensorIOMode>(std::stoi(of(this).ask("tensor", name)));
}
char const *ICudaEngine::getAliasedInputTensor(char const *tensorName) const noexcept {
  of(this).alias = of(this).ask("get_aliased_input_tensor", tensorName);
  return of(this).alias == "None" ? nullptr : of(this).alias.c_str();
}
IExecutionContext *ICudaEngine::createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept {
  expect(strategy == ExecutionContextAllocationStrategy::kUSER_MANAGED, "contexts shall share memory");
  return new Context(of(this).ask("context"));
}

bool IExecutionContext::setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept {
  expect(stream, "the default stream");
  return of(this).yes("set_optimization_profile_async", std::to_string(profileIndex) + " 1");
}
bool IExecutionContext::setInputShape(char const *tensorName, Dims const &dims) noexcept {
  std::string shape;
  for (int i = 0; i < dims.nbDims; i++) shape += std::to_string(dims.d[i]) + ",";
  return of(this).yes("set_input_shape", std::string(tensorName) + " (" + shape + ")");
}
bool IExecutionContext::setTensorAddress(char const *tensorName, void *data) noexcept {
  if (!machine().holds(data, 1) || (static_cast<char *>(data) - machine().reserved) % ALIGNMENT) return false;
  return of(this).yes("set_tensor_address", std::string(tensorName) + " " + address(data));
}
int32_t IExecutionContext::inferShapes(int32_t, char const **) noexcept { return of(this).ask("infer_shapes") != "[]"; }
void IExecutionContext::setDeviceMemoryV2(void *memory, int64_t size) noexcept {
  expect(machine().holds(memory, size), "scratch memory is not on the device");
  of(this).ask("set_device_memory", address(memory) + " " + std::to_string(size));
}
bool IExecutionContext::enqueueV3(cudaStream_t stream) noexcept {
  if (!of(this).yes("execute_async_v3", "1")) return false;
  stream->work.push_back([] { machine().ask("work 0"); });
  return true;
}

}  // namespace nvinfer1

extern "C" {

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}
cudaError_t cudaMalloc(void **devPtr, size_t size) {
  Machine &gpu = machine();
  const size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (whole > gpu.size - gpu.used) return cudaErrorMemoryAllocation;
  char *made = gpu.reserved + gpu.used;
  gpu.used += whole, gpu.left++;
  gpu.sizes[made] = whole;
  std::memset(gpu.at(made), GARBAGE, whole);
  *devPtr = made;
  return cudaSuccess;
}
cudaError_t cudaFree(void *devPtr) {
  finish();
  const auto found = machine().sizes.find(static_cast<char *>(devPtr));
  expect(found != machine().sizes.end(), "memory is freed that is not there");
  std::memset(machine().at(devPtr), GARBAGE, found->second);
  machine().sizes.erase(found);
  machine().left--;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **ptr, size_t size) {
  machine().left++;
  *ptr = std::memset(std::malloc(size), GARBAGE, size);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *ptr) {
  finish();
  machine().left--;
  std::free(ptr);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  const bool up = kind == cudaMemcpyHostToDevice;
  if (!machine().holds(up ? dst : src, count) || machine().holds(up ? src : dst, 1)) return cudaErrorInvalidValue;
  if (!up) std::memset(dst, GARBAGE, count);
  stream->work.push_back([=] { std::memcpy(up ? machine().at(dst) : dst, up ? src : machine().at(src), count); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream) {
  if (!machine().holds(devPtr, count)) return cudaErrorInvalidValue;
  stream->work.push_back([=] { std::memset(machine().at(devPtr), value, count); });
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *pStream) {
  machine().left++;
  *pStream = machine().stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  for (; !stream->work.empty(); stream->work.pop_front()) stream->work.front()();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  machine().left--;
  machine().stream = nullptr;
  delete stream;
  return cudaSuccess;
}
}
