// The part of ONNX Runtime's C interface that these operators use, because the wheels have no headers. The interface is a table of
// functions that only grows, so each function keeps its place (onnxruntime_c_api.h, interface version 18 and later).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ort {

struct Status;
struct Value;
struct Info;     // OrtKernelInfo: a node's attributes and constant inputs, while a session is made
struct Context;  // OrtKernelContext: a node's inputs and outputs, during a call
struct Shape;    // OrtTensorTypeAndShapeInfo
struct Domain;   // OrtCustomOpDomain
struct Options;  // OrtSessionOptions

constexpr uint32_t VERSION = 18;
enum Code { FAIL = 1, INVALID_ARGUMENT = 2 };
enum Type { FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7 };

struct Table {
  void *function[275];
};

// Call the function at a place of the table.
template <int place, typename... Arguments> Status *call(const Table *table, Arguments... arguments) {
  return reinterpret_cast<Status *(*)(Arguments...)>(table->function[place])(arguments...);
}
constexpr int CREATE_STATUS = 0, CREATE_DOMAIN = 26, ADD_TO_DOMAIN = 27, ADD_DOMAIN = 28, DATA = 51, ELEMENT_TYPE = 60,
              NUM_DIMENSIONS = 61, DIMENSIONS = 62, SHAPE = 65, FLOAT_ATTRIBUTE = 85, INT_ATTRIBUTE = 86, NUM_INPUTS = 88,
              INPUT = 90, OUTPUT = 91, RELEASE_STATUS = 93, RELEASE_SHAPE = 99, INT_ARRAY_ATTRIBUTE = 163,
              CONSTANT_INPUT = 249, PARALLEL_FOR = 274;

struct ApiBase {
  const Table *(*get_table)(uint32_t version);
  const char *(*version)();
};

// OrtCustomOp. A session reads only the members that exist in `version`.
struct CustomOp {
  uint32_t version;
  void *(*create)(const CustomOp *, const Table *, const Info *);
  const char *(*name)(const CustomOp *);
  const char *(*provider)(const CustomOp *);
  Type (*input_type)(const CustomOp *, size_t);
  size_t (*num_inputs)(const CustomOp *);
  Type (*output_type)(const CustomOp *, size_t);
  size_t (*num_outputs)(const CustomOp *);
  void (*compute)(void *, Context *);
  void (*destroy)(void *);
  int (*input_kind)(const CustomOp *, size_t);  // 0: required, 1: optional, 2: any number
  int (*output_kind)(const CustomOp *, size_t);
  int (*input_memory)(const CustomOp *, size_t);
  int (*least_inputs)(const CustomOp *);
  int (*one_input_type)(const CustomOp *);
  int (*least_outputs)(const CustomOp *);
  int (*one_output_type)(const CustomOp *);
  Status *(*create_with_status)(const CustomOp *, const Table *, const Info *, void **);
  Status *(*compute_with_status)(void *, Context *);
  Status *(*infer_shape)(const CustomOp *, void *);
  int (*first_version)(const CustomOp *);
  int (*last_version)(const CustomOp *);
  size_t (*may_share)(int **, int **);
  void (*release_share)(int *, int *);
  size_t (*aliases)(int **, int **);
  void (*release_aliases)(int *, int *);
};

}  // namespace ort
