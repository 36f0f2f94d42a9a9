// How stored weights become the panels that products read (SPECIFICATION.md, Weights). Nothing is
// rounded.
#pragma once
#include "kernels.h"

namespace eesd {

// What a weight is stored as. The first three are those of Format, the last ten blocks of GGUF
// files. export/cpu/panels.py has them in the same order.
enum Stored : int64_t { FLOATS32, FLOATS16, BFLOATS16, INT8, UINT8, INT16, Q4_0, Q4_1, Q5_0, Q5_1,
                        Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, STORED_TYPES };

// An array of values for inputs and outputs, in so many bytes from `data` on. Steps are the bytes
// from one value to the next.
struct Array {
  const uint8_t *data;
  int64_t bytes, input_step, output_step;
};

// A stored weight. export/cpu/panels.py has the same members.
struct Source {
  int64_t type, inputs, outputs;
  int64_t groups;          // of levels in arrays: scales of an output
  int64_t rows;            // of blocks: outputs that are stored
  int64_t planes;          // whether levels of 8 bits shall lie in two planes, where they can
  Array values;            // floats, levels, or without steps the blocks of row after row
  Array scales, minimums;  // of levels in arrays: float32; minimums may be null
  const int64_t *order;    // of blocks: the stored row of each output; null: they are in order
};

}  // namespace eesd

extern "C" {

// Find out on some threads how a weight is packed: the 7 numbers that describe it, and its bytes.
// Returns null, or why it cannot be packed.
EESD_EXPORT const char *eesd_plan(const eesd::Source *source, int64_t threads, int64_t *numbers);

// Pack a weight as eesd_plan says, into so many bytes. Returns null, or why it cannot be packed.
EESD_EXPORT const char *eesd_pack(const eesd::Source *source, int64_t threads,
                                  const int64_t *numbers, uint8_t *to, int64_t bytes);
}
