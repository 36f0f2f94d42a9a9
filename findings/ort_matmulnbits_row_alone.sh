#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU) with onnx 1.23.2: MatMulNBits gives a row alone other bits than the same
# row beside others.
#
# Behaviour: DequantizeLinear (blocks of 32, int4) and MatMul become one MatMulNBits where the
# session option session.qdq_matmulnbits_accuracy_level is 1 (float32 activations). One row of x
# then has other bits than the same row in a call of 2 rows or more, and these agree with each
# other. So a decoder that verifies several tokens at once does not give the logits of decoding
# one by one, although weights, activations and accuracy level are the same. Without the option
# the weights are dequantized when the session is made, and rows do not depend on each other.
#
# Output seen (AVX-512):
#   level 1: ['MatMulNBits'], a row alone differs from the same row beside others: True
#   no level: ['MatMul'], a row alone differs from the same row beside others: False
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0
"$place/venv/bin/python" - <<'PYTHON'
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

K, N = 2048, 2048
random = np.random.default_rng(0)
levels = random.integers(-8, 8, (K, N), dtype=np.int8)
packed = (levels.reshape(-1)[0::2] & 15) | ((levels.reshape(-1)[1::2] & 15) << 4)
weight = TensorProto(name="w", data_type=TensorProto.INT4, dims=[K, N])
weight.raw_data = packed.astype(np.uint8).tobytes()
scales = numpy_helper.from_array(
    random.uniform(0.01, 0.02, (K // 32, N)).astype(np.float32), "scales"
)
graph = helper.make_graph(
    [
        helper.make_node("DequantizeLinear", ["w", "scales"], ["d"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", K])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", N])],
    [weight, scales],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
x = random.standard_normal((8, K)).astype(np.float32)


def differs(level):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if level:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
    else:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    with tempfile.TemporaryDirectory() as directory:
        options.optimized_model_filepath = str(Path(directory, "optimized.onnx"))
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        kinds = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    alone = session.run(None, {"x": x[:1]})[0]
    beside = [session.run(None, {"x": x[:count]})[0][:1] for count in (2, 3, 8)]
    assert all(np.array_equal(beside[0], one) for one in beside[1:]) or not level
    return kinds, not np.array_equal(alone, beside[0])


kinds, changed = differs("1")
print(f"level 1: {kinds}, a row alone differs from the same row beside others: {changed}")
assert changed and "MatMulNBits" in kinds, "the behaviour changed"
kinds, changed = differs("")
print(f"no level: {kinds}, a row alone differs from the same row beside others: {changed}")
assert "MatMulNBits" not in kinds, "the behaviour changed"
PYTHON
