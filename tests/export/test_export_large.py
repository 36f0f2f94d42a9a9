"""Tests that the memory of an export does not grow with the model. Graphs are made without weights,
and the weights are streamed one tensor at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import LLAMA_70B, write_checkpoint

from eesd.export.engine_dir import stored_sources, untrained_head, weight_sources
from eesd.export.onnx_graph import ExportOptions, make_graph
from eesd.export.weights import layout_weights
from eesd.model.checkpoint import Checkpoint

GB = 10**9
MB = 10**6

# The kernel reports the peak of this process alone; getrusage would include the parent process.
COMMON = """
import json, sys
from pathlib import Path
from eesd.common.quantization import BLOCK, UNQUANTIZED, Quantization, Quantizations
from eesd.export.engine_dir import stored_sources, untrained_head, weight_sources
from eesd.export.onnx_graph import ExportOptions, to_proto, make_graph
from eesd.export.weights import layout_weights, write_weights
from eesd.model.checkpoint import Checkpoint

def memory(field):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024

def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")

checkpoint = Checkpoint(Path(sys.argv[1]))
head = untrained_head(checkpoint, int(sys.argv[2]))
kind = dict(enumerate(sys.argv)).get(5)
quantization = Quantizations(*[Quantization(kind, BLOCK)] * 3) if kind else UNQUANTIZED
options = ExportOptions(sys.argv[3], 4096, 32, 8, quantization=quantization)
names = ("draft", "verify")
graphs = [make_graph(name, checkpoint.geometry, head.config, options) for name in names]
layout = layout_weights((graph.weights for graph in graphs))
"""

GRAPH_STAGE = """
sizes = [len(to_proto(graph, layout.locations).SerializeToString()) for graph in graphs]
nodes = [len(graph.model.graph.node) for graph in graphs]
print(json.dumps({"peak": memory("VmHWM"), "sizes": sizes, "nodes": nodes, "weights": layout.size}))
"""

WEIGHT_STAGE = """
before = reset_peak()
every = weight_sources(checkpoint, head, 4096)
sources = stored_sources(layout.weights, every, checkpoint.geometry)
info = write_weights(Path(sys.argv[4]), layout, sources, lambda *_: None)
grown = memory("VmHWM") - before
print(json.dumps({"grown": grown, "size": info.size, "tensors": len(layout.weights)}))
"""


def measure(code: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


@pytest.mark.slow
def test_graphs_of_a_70b_model_take_less_than_2_gb(tmp_path: Path) -> None:
    """The 15 shards are sparse files. The test uses only their headers, the fingerprint and the
    graphs."""
    directory = write_checkpoint(tmp_path / "70b", LLAMA_70B, shards=15, sparse=True)
    assert sum(path.stat().st_size for path in directory.iterdir()) > 137 * GB
    assert sum(path.stat().st_blocks * 512 for path in directory.iterdir()) < 10 * MB
    measured = measure(GRAPH_STAGE, directory, 4, "float16")
    assert measured["weights"] > 137 * GB
    assert measured["peak"] < 2 * GB
    assert max(measured["nodes"]) < 28 * 82 and max(measured["sizes"]) < 2 * MB


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Sharded checkpoints of 3 and 12 layers (110 and 341 MB) whose tensors have the same sizes."""
    parent = tmp_path_factory.mktemp("large")
    size = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "vocab_size": 8000,
    }
    configs = {layers: LLAMA_70B | size | {"num_hidden_layers": layers} for layers in (3, 12)}
    return {
        n: write_checkpoint(parent / str(n), config, shards=4, sparse=False)
        for n, config in configs.items()
    }


def largest_tensor(checkpoint: Checkpoint) -> int:
    return max(tensor.nbytes for tensor in checkpoint.tensors.values())


@pytest.mark.slow
def test_writing_weights_takes_the_memory_of_one_tensor(
    checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    """The bounds are generous, because the kernel decides which pages of mapped files count."""
    grown = {}
    for layers, directory in checkpoints.items():
        measured = measure(WEIGHT_STAGE, directory, 1, "float16", tmp_path / f"weights-{layers}")
        checkpoint = Checkpoint(directory)
        model = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        assert measured["tensors"] > 6 * layers and measured["size"] > model
        grown[layers] = measured["grown"]
        largest = largest_tensor(checkpoint)
        assert grown[layers] < 4 * largest + 24 * MB
        assert_weights(tmp_path / f"weights-{layers}", checkpoint)
    assert model > 300 * MB and grown[12] < model / 3
    assert grown[12] < grown[3] + largest + 8 * MB


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("float32",), ("float16", "int8"), ("float16", "int4")], ids=str
)
def test_writing_changed_weights_takes_the_memory_of_one_tensor(
    checkpoints: dict[int, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """An export needs memory for one tensor, for the widened tensor or its levels, and for a piece
    of the tensor in float32."""
    dtype, *kind = options
    measured = measure(WEIGHT_STAGE, checkpoints[12], 1, dtype, tmp_path / "weights", *kind)
    assert measured["grown"] < 6 * largest_tensor(Checkpoint(checkpoints[12])) + 24 * MB


def assert_weights(path: Path, checkpoint: Checkpoint) -> None:
    """Check that some weights of the file equal the weights of the checkpoint."""
    head = untrained_head(checkpoint, 1)
    options = ExportOptions("float16", 4096, 32, 8)
    graph = make_graph("verify", checkpoint.geometry, head.config, options)
    layout = layout_weights(
        [make_graph("draft", checkpoint.geometry, head.config, options).weights, graph.weights]
    )
    sources = stored_sources(
        layout.weights, weight_sources(checkpoint, head, 4096), checkpoint.geometry
    )
    rounded = [weight for weight in layout.weights if weight.dtype == "float16"]
    with path.open("rb") as file:
        for weight in (*rounded[:12:4], *rounded[-12::4], rounded[-1]):
            _, offset, length = layout.locations[weight.name]
            file.seek(offset)
            stored = np.frombuffer(file.read(length), np.float16).reshape(weight.stored_shape)
            original = sources[weight.name].read().astype(np.float16)
            assert np.array_equal(stored.T if weight.transposed else stored, original), weight.name
