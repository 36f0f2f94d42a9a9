// The part of TensorRT's C++ API that examples/embedding/cpp uses: the signatures are those of NvInferRuntime.h of 10.15 to 11.1.
// Its implementation is fake.cpp.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime_api.h"

namespace nvinfer1 {

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT32 = 3, kBF16 = 7, kINT64 = 8 };
enum class TensorIOMode : int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };
enum class ExecutionContextAllocationStrategy : int32_t { kSTATIC = 0, kON_PROFILE_CHANGE = 1, kUSER_MANAGED = 2 };

class Dims64 {
 public:
  static constexpr int32_t MAX_DIMS{8};
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

class ILogger {
 public:
  enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };
  virtual void log(Severity severity, char const *msg) noexcept = 0;
  virtual ~ILogger() = default;
};

class IExecutionContext {
 public:
  virtual ~IExecutionContext() noexcept = default;
  bool setOptimizationProfileAsync(int32_t profileIndex, cudaStream_t stream) noexcept;
  bool setInputShape(char const *tensorName, Dims const &dims) noexcept;
  bool setTensorAddress(char const *tensorName, void *data) noexcept;
  int32_t inferShapes(int32_t nbMaxNames, char const **tensorNames) noexcept;
  void setDeviceMemoryV2(void *memory, int64_t size) noexcept;
  bool enqueueV3(cudaStream_t stream) noexcept;
};

class ICudaEngine {
 public:
  virtual ~ICudaEngine() noexcept = default;
  int32_t getNbIOTensors() const noexcept;
  Dims getTensorShape(char const *tensorName) const noexcept;
  DataType getTensorDataType(char const *tensorName) const noexcept;
  TensorIOMode getTensorIOMode(char const *tensorName) const noexcept;
  [[nodiscard]] char const *getAliasedInputTensor(char const *tensorName) const noexcept;
  int64_t getDeviceMemorySizeV2() const noexcept;
  using Strategy = ExecutionContextAllocationStrategy;
  IExecutionContext *createExecutionContext(Strategy strategy = Strategy::kSTATIC) noexcept;
};

class IRuntime {
 public:
  virtual ~IRuntime() noexcept = default;
  ICudaEngine *deserializeCudaEngine(void const *blob, std::size_t size) noexcept;
};

IRuntime *createInferRuntime(ILogger &logger) noexcept;

}  // namespace nvinfer1
