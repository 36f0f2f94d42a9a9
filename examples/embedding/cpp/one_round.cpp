// Greedy decoding with a draft of fixed length over the TensorRT plans of an engine directory: examples/one_round.py for services
// in C++. docs/embedding.md explains the build, docs/engine-directory.md the directory.
//
//     one_round plans/ 3 40 5 9 3        # drafted tokens of a round, new tokens, ids of the prompt
//
// It prints the ids of the text, and the tokens per round. Like the Python program it leaves out trees, sampling, and everything
// that makes EESD fast. It is for directories with verify in one stage.

#include <NvInfer.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "manifest.h"

// ---- CUDA and TensorRT

static void check(cudaError_t error, const char *task) {
  require(error == cudaSuccess, "CUDA cannot ", task, " (", cudaGetErrorString(error), ").");
}

struct Free {
  void operator()(void *memory) const { cudaFree(memory); }
};
struct FreeHost {
  void operator()(void *memory) const { cudaFreeHost(memory); }
};
using Memory = std::unique_ptr<void, Free>;
using HostMemory = std::unique_ptr<void, FreeHost>;  // pinned: other memory makes the host wait in each copy

static Memory allocate(int64_t bytes) {
  void *memory = nullptr;
  check(cudaMalloc(&memory, std::max<int64_t>(bytes, 1)), "allocate memory of the GPU");
  return Memory(memory);
}
static HostMemory allocate_host(int64_t bytes) {
  void *memory = nullptr;
  check(cudaMallocHost(&memory, std::max<int64_t>(bytes, 1)), "allocate pinned memory");
  return HostMemory(memory);
}

class Logger : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char *message) noexcept override {
    if (severity <= Severity::kERROR && first.empty()) first.assign(message, std::strcspn(message, "\n"));
  }
  std::string reason() const { return first.empty() ? "TensorRT does not say why" : first; }
  std::string first;  // the first error; later errors follow from it
};

// Owns the resources that all calls share. A service with a runtime, stream or memory would pass them in here.
struct Device {
  Logger logger;
  std::unique_ptr<nvinfer1::IRuntime> runtime{nvinfer1::createInferRuntime(logger)};
  cudaStream_t stream = nullptr;
  std::map<std::string, Memory> caches;  // of verify; the draft has some of them
  Memory scratch;
  int64_t scratch_bytes = 0;

  Device() {
    require(runtime != nullptr, "TensorRT does not start (", logger.reason(), "); update the NVIDIA driver.");
    check(cudaStreamCreate(&stream), "make a stream");
  }
  ~Device() {
    cudaStreamSynchronize(stream);  // an error may have left work there that uses the memory
    cudaStreamDestroy(stream);
  }
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;
};

struct Plan {
  const Manifest &manifest;
  const Graph &graph;
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
};

static bool is_cache(const Tensor &tensor) { return tensor.name.rfind("key_", 0) == 0 || tensor.name.rfind("value_", 0) == 0; }

// The shape in a call. An engine has -1 for dimensions that vary between calls, see has_binding.
static nvinfer1::Dims shape_of(const Tensor &tensor, int64_t slots, int64_t count, int64_t rows) {
  nvinfer1::Dims shape{};
  for (const std::string &size : tensor.shape)
    shape.d[shape.nbDims++] = size == "B" ? 1 : size == "n" ? count : size == "R" ? rows : size == "S" ? slots : std::stoll(size);
  return shape;
}

static bool has_binding(const nvinfer1::ICudaEngine &engine, const Tensor &tensor, int64_t slots) {
  const auto mode = tensor.is_input ? nvinfer1::TensorIOMode::kINPUT : nvinfer1::TensorIOMode::kOUTPUT;
  if (engine.getTensorIOMode(tensor.name.c_str()) != mode) return false;
  if (engine.getTensorDataType(tensor.name.c_str()) != tensor.type->type) return false;
  const nvinfer1::Dims found = engine.getTensorShape(tensor.name.c_str()), wanted = shape_of(tensor, slots, -1, -1);
  if (found.nbDims != wanted.nbDims) return false;
  for (int i = 0; i < found.nbDims; i++) {
    const std::string &size = tensor.shape[i];
    // A plan may accept more sequences than this program's one, and a mask of fewer columns. It may fix n to 1.
    const bool any = found.d[i] == -1 && (size == "B" || (size == "S" && !is_cache(tensor)));
    const bool one = found.d[i] == 1 && (size == "n" || size == "R");
    if (found.d[i] != wanted.d[i] && !any && !one) return false;
  }
  return true;
}

static Plan load_plan(Device &device, const Manifest &manifest, const Graph &graph, const std::string &directory) {
  const std::string path = directory + "/" + graph.plan, again = "; build it again with: eesd-build --force " + directory + ".";
  // The file is mapped, not read: reading the plan of a large model would fill main memory a second time.
  const int file = open(path.c_str(), O_RDONLY);
  require(file >= 0, path, " cannot be read (", std::strerror(errno), ")", again);
  struct stat info {};
  fstat(file, &info);
  const bool whole = info.st_size == graph.plan_bytes;
  void *plan = whole ? mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  require(whole, path, " has ", info.st_size, " bytes where the manifest says ", graph.plan_bytes, again);
  require(plan != MAP_FAILED, path, " cannot be mapped (", std::strerror(errno), ")", again);
  std::unique_ptr<nvinfer1::ICudaEngine> engine(device.runtime->deserializeCudaEngine(plan, info.st_size));
  munmap(plan, info.st_size);
  require(engine != nullptr, "TensorRT cannot load ", path, " (", device.logger.reason(), ")", again);

  for (const Tensor &tensor : graph.tensors) {
    require(has_binding(*engine, tensor, manifest.slots), path, " has no ", tensor.name, " with the type and the shape of the ",
            "manifest", again);
    if (is_cache(tensor) && !tensor.is_input) {
      // Later calls would not see keys and values that are written to a copy.
      const char *input = engine->getAliasedInputTensor(tensor.name.c_str());
      require(input && input + std::string("_out") == tensor.name, path, " does not update ", tensor.name, " in place", again);
    }
  }
  require(engine->getNbIOTensors() == static_cast<int32_t>(graph.tensors.size()), path, " has other inputs and outputs than ",
          graph.file, again);
  // Contexts run one after another, so they share the memory of the largest.
  device.scratch_bytes = std::max(device.scratch_bytes, engine->getDeviceMemorySizeV2());
  return {manifest, graph, std::move(engine)};
}

// ---- A call

static int64_t bytes_of(const Tensor &tensor, const nvinfer1::Dims &shape) {
  int64_t bytes = tensor.type->bytes;
  for (int i = 0; i < shape.nbDims; i++) bytes *= shape.d[i];
  return bytes;
}

// A call of a plan with a fixed number of tokens. Shapes are set once: other shapes may run other kernels, whose logits round
// differently, and a CUDA graph keeps the shapes with which it was captured.
class Step {
 public:
  // `rows` tokens get logits. `wanted` is the output that the host reads; empty for none.
  Step(Device &device, const Plan &plan, int64_t count, int64_t rows, const std::string &wanted)
      : device_(device), plan_(plan), count_(count), rows_(rows), wanted_(wanted) {
    const size_t profile = count > plan.graph.most[0] ? 1 : 0;  // of decoding, and of prefill
    accept(profile < plan.graph.most.size() && count <= plan.graph.most[profile]);
    context_.reset(plan.engine->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
    require(context_ != nullptr, "TensorRT makes no context of ", plan.graph.file, " (", device.logger.reason(), ").");
    accept(context_->setOptimizationProfileAsync(static_cast<int32_t>(profile), device.stream));
    check(cudaStreamSynchronize(device.stream), "choose a profile");
    for (const Tensor &tensor : plan.graph.tensors) bind(tensor);
    accept(context_->inferShapes(0, nullptr) == 0);
    context_->setDeviceMemoryV2(device.scratch.get(), device.scratch_bytes);
  }
  int64_t count() const { return count_; }

  // Runs a chain of tokens whose keys and values fill the slots from `slot` on, and waits. Missing tokens are padded: their keys
  // and values follow the chain, where later tokens overwrite them before any token sees them.
  void operator()(const Tokens &tokens, int64_t slot) {
    int64_t *ids = given<int64_t>("input_ids", count_), *positions = given<int64_t>("position_ids", count_);
    for (int64_t i = 0; i < count_; i++) {
      ids[i] = i < static_cast<int64_t>(tokens.size()) ? tokens[i] : 0;
      positions[i] = std::min(slot + i, plan_.manifest.max_seq_len - 1);  // rotary tables end there
    }
    *given<int64_t>("write_indices", 1) = slot;
    if (inputs_.count("logit_rows"))
      for (int64_t i = 0; i < rows_; i++) given<int64_t>("logit_rows", rows_)[i] = i;
    // A token sees the slots up to its own. A service would make the mask on the GPU, with only the columns that the text needs.
    const int64_t slots = plan_.manifest.slots, bytes = mask_->bytes;
    char *mask = given<char>("attn_mask", count_ * slots * bytes);
    std::memset(mask, 0, count_ * slots * bytes);
    for (int64_t i = 0; i < count_; i++)
      for (int64_t later = slot + i + 1; later < slots; later++)
        std::memcpy(mask + (i * slots + later) * bytes, &mask_->hidden, bytes);  // hosts of GPUs are little-endian

    const cudaStream_t stream = device_.stream;
    for (auto &[name, input] : inputs_)
      check(cudaMemcpyAsync(input.there.get(), input.here.get(), input.bytes, cudaMemcpyHostToDevice, stream), "copy inputs");
    require(context_->enqueueV3(stream), "TensorRT cannot run ", plan_.graph.file, " (", device_.logger.reason(), ").");
    if (!wanted_.empty()) {
      Buffer &output = outputs_[wanted_];
      check(cudaMemcpyAsync(output.here.get(), output.there.get(), output.bytes, cudaMemcpyDeviceToHost, stream), "copy results");
    }
    check(cudaStreamSynchronize(stream), "finish a call");
  }
  template <typename T> const T *result(int64_t count) {
    Buffer &output = outputs_[wanted_];
    require(output.bytes == count * static_cast<int64_t>(sizeof(T)), "The manifest gives ", wanted_, " another size.");
    return static_cast<const T *>(output.here.get());
  }

 private:
  struct Buffer {
    int64_t bytes = 0;
    Memory there;
    HostMemory here;
  };

  void accept(bool accepted) const {
    require(accepted, "The plan of ", plan_.graph.file, " takes no call of ", count_, " tokens; ask for fewer drafted tokens.");
  }

  void bind(const Tensor &tensor) {
    const nvinfer1::Dims shape = shape_of(tensor, plan_.manifest.slots, count_, rows_);
    void *address = nullptr;
    if (is_cache(tensor)) {
      // An output has the address of its input, and draft the addresses of verify: all calls share one KV cache.
      const std::string name = tensor.is_input ? tensor.name : tensor.name.substr(0, tensor.name.size() - std::strlen("_out"));
      require(device_.caches.count(name) == 1, "The draft has a cache ", name, " that verify lacks; export again.");
      address = device_.caches.at(name).get();
    } else {
      const int64_t bytes = bytes_of(tensor, shape);
      const bool copied = tensor.is_input || tensor.name == wanted_;
      Buffer &buffer = (tensor.is_input ? inputs_ : outputs_)[tensor.name];
      buffer = {bytes, allocate(bytes), copied ? allocate_host(bytes) : nullptr};
      address = buffer.there.get();
    }
    if (tensor.name == "attn_mask") mask_ = tensor.type;
    if (tensor.is_input) accept(context_->setInputShape(tensor.name.c_str(), shape));
    accept(context_->setTensorAddress(tensor.name.c_str(), address));
  }
  template <typename T> T *given(const char *name, int64_t count) {
    const auto found = inputs_.find(name);
    require(found != inputs_.end() && found->second.bytes == count * static_cast<int64_t>(sizeof(T)),
            "The manifest has no input ", name, " of ", count * sizeof(T), " bytes; export again with: eesd-export.");
    return static_cast<T *>(found->second.here.get());
  }

  Device &device_;
  const Plan &plan_;
  int64_t count_, rows_;
  std::string wanted_;
  const Type *mask_ = &TYPES[0];
  std::map<std::string, Buffer> inputs_, outputs_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
};

// ---- Decoding

// Caches begin as zeros: attention multiplies hidden slots by 0, and new memory may contain NaN.
static void make_caches(Device &device, const Plan &verify) {
  for (const Tensor &tensor : verify.graph.tensors)
    if (is_cache(tensor) && tensor.is_input) {
      const int64_t bytes = bytes_of(tensor, shape_of(tensor, verify.manifest.slots, 1, 1));
      void *cache = (device.caches[tensor.name] = allocate(bytes)).get();
      check(cudaMemsetAsync(cache, 0, bytes, device.stream), "clear a cache");
    }
}

// Fills the caches of all layers, including the exit head's, so that the first round may draft. Logits are not used. A service
// would pad the last piece, to keep the context.
static void prefill(Device &device, const Plan &verify, const Tokens &tokens) {
  const int64_t total = tokens.size(), most = verify.graph.most.back();
  std::optional<Step> call;
  for (int64_t slot = 0, count; slot < total; slot += count) {
    count = std::min(most, total - slot);
    if (!call || call->count() != count) call.emplace(device, verify, count, 1, "");
    (*call)(Tokens(tokens.begin() + slot, tokens.begin() + slot + count), slot);
  }
}

static int64_t likeliest(const float *logits, int64_t count) { return std::max_element(logits, logits + count) - logits; }

struct Text {
  Tokens tokens;
  int64_t rounds;
};

// Greedy tokens after the prompt, up to EOS.
static Text generate(const std::string &directory, int64_t length, int64_t new_tokens, const Tokens &prompt) {
  const Manifest manifest = read_manifest(directory, length > 0);
  const int64_t size = prompt.size(), vocab = manifest.vocab_size;
  require(length <= manifest.most_drafted, "A round of ", directory, " drafts at most ", manifest.most_drafted, " tokens.");
  require(size + new_tokens <= manifest.max_seq_len, "A prompt of ", size, " tokens and ", new_tokens, " new ones need more ",
          "than the ", manifest.max_seq_len, " slots of the cache; ask for fewer, or export with a larger --max-seq-len.");
  require(*std::max_element(prompt.begin(), prompt.end()) < vocab, "The prompt has an id outside of the vocabulary of ", vocab,
          " tokens.");

  Device device;
  const Plan verifier = load_plan(device, manifest, manifest.verify, directory);
  std::optional<Plan> drafter;
  if (length > 0) drafter.emplace(load_plan(device, manifest, manifest.draft, directory));
  device.scratch = allocate(device.scratch_bytes);
  make_caches(device, verifier);
  std::optional<Step> draft;
  if (drafter) draft.emplace(device, *drafter, 1, 1, "topk_ids");
  // Every round has the same number of tokens, so the same kernel computes logits, however many drafted tokens remain.
  Step verify(device, verifier, length + 1, length + 1, "logits");

  Text text{prompt, 0};
  Tokens &tokens = text.tokens;
  prefill(device, verifier, Tokens(tokens.begin(), tokens.end() - 1));  // all but the last token, the first root
  const auto finished = [&] { return Text{Tokens(tokens.begin() + size, tokens.end()), text.rounds}; };
  const int64_t end = size + new_tokens;
  while (static_cast<int64_t>(tokens.size()) < end) {
    const int64_t root = tokens.size() - 1;
    Tokens chain{tokens.back()};
    for (int64_t step = 0; step < std::min(length, end - root - 2); step++) {  // draft: the bonus token must fit after it
      (*draft)({chain.back()}, root + step);
      chain.push_back(*draft->result<int64_t>(manifest.top_k));  // ids of the whole vocabulary, the most likely first
    }
    verify(chain, root);  // verify: one pass over the root and the draft
    text.rounds++;
    for (size_t i = 0; i < chain.size(); i++) {  // commit the accepted tokens, and the bonus token, the next root
      // A service would choose on the GPU, and copy ids instead of logits.
      const int64_t chosen = likeliest(verify.result<float>((length + 1) * vocab) + i * vocab, vocab);
      tokens.push_back(chosen);
      if (std::count(manifest.eos.begin(), manifest.eos.end(), chosen)) return finished();
      if (i + 1 < chain.size() && chain[i + 1] != chosen) break;  // the next round overwrites the slots of the rest
    }
  }
  return finished();
}

// ---- The command

static int64_t number(const char *text, const char *what) {
  const char *end = text + std::strlen(text);
  int64_t found = 0;
  const auto read = std::from_chars(text, end, found);
  const bool is_number = read.ec == std::errc() && read.ptr == end && found >= 0 && found <= MOST;
  require(is_number, "\"", text, "\" is no ", what, "; give an integer from 0 on.");
  return found;
}

int main(int argc, char **argv) {
  try {
    require(argc >= 5, "Usage: one_round DIRECTORY DRAFTED NEW_TOKENS ID...");
    Tokens prompt;
    for (int i = 4; i < argc; i++) prompt.push_back(number(argv[i], "token id"));
    const int64_t drafted = number(argv[2], "number of drafted tokens"), new_tokens = number(argv[3], "number of new tokens");
    const Text text = generate(argv[1], drafted, new_tokens, prompt);
    for (size_t i = 0; i < text.tokens.size(); i++) std::printf(i ? " %lld" : "%lld", static_cast<long long>(text.tokens[i]));
    std::printf("\n%.2f tokens a round\n", text.tokens.size() / std::max(1.0, static_cast<double>(text.rounds)));
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
