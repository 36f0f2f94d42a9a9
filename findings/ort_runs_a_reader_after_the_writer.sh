#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU) with onnx 1.23.2: a node that reads a cache before it is written can run
# after the write.
#
# Behaviour: a graph sums a cache (ReduceSum) and then writes into it (TensorScatter, which gives a
# new value). With I/O binding, the new value may be bound to the buffer of the cache, which is how
# a KV cache is updated in place. The order of the nodes in the graph is legal, and it is the one
# that a reader of the graph expects. ONNX Runtime runs the write first and sums what was written.
# There is no error and no warning, since it does not know that two buffers are one.
#
# Output seen: 64 ones are summed, then two rows of four tens are written
#   right: 64; seen: 136.0; the cache now sums to 136.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper


def value(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


nodes = [
    helper.make_node("ReduceSum", ["key"], ["total"], keepdims=0),
    helper.make_node("TensorScatter", ["key", "new", "at"], ["key_out"], axis=2),
]
graph = helper.make_graph(
    nodes,
    "graph",
    [
        value("key", TensorProto.FLOAT, ["B", 1, 16, 4]),
        value("new", TensorProto.FLOAT, ["B", 1, "n", 4]),
        value("at", TensorProto.INT64, ["B"]),
    ],
    [value("total", TensorProto.FLOAT, []), value("key_out", TensorProto.FLOAT, ["B", 1, 16, 4])],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(
    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
)
cache = np.ones((1, 1, 16, 4), np.float32)
new = np.full((1, 1, 2, 4), 10, np.float32)
at = np.array([3])
binding = session.io_binding()
for name, array in (("key", cache), ("new", new), ("at", at)):
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
binding.bind_output("total")
binding.bind_output("key_out", "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
session.run_with_iobinding(binding)
total = float(binding.get_outputs()[0].numpy())
print(f"right: 64; seen: {total}; the cache now sums to {cache.sum()}")
assert total == 136 == cache.sum(), "the behaviour changed"
PYTHON
