"""Tests of the bytes that the kernels of plans read and write. The log of TensorRT-RTX's builder
lists the kernels, even on a machine without a GPU. Skipped without TensorRT-RTX."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
from support.command import export_engine, slow_but, succeed
from support.synthetic import LLAMA_70B, write_checkpoint

from eesd.common.manifest import GraphInfo, Manifest, load_manifest
from eesd.common.weights import EMBEDDINGS, ROTARY_TABLES, weight_bytes, weights_of
from eesd.export import plans as build_plans
from eesd.export.build import main as build_main
from eesd.runtime.engines.trt_plans import LONG_CACHE, attended_slots

pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")

_BITS = {
    "Half": 16,
    "BFloat16": 16,
    "Float": 32,
    "Int8": 8,
    "Int4": 4,
    "Int32": 32,
    "Int64": 64,
    "Bool": 8,
}
_LAYER = re.compile(
    r"Name: (.*?), LayerType: (\w+), Inputs: (.*?), Constants: (.*?), Outputs: (.*?), TacticName: "
)
_TENSOR = re.compile(r"\{ Name: ([^,]+), Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)")


class Tensor(NamedTuple):
    """A tensor that a kernel reads or writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The size in bytes, or 0 if it depends on the number of nodes of the call, because such
        tensors are small."""
        count = 1
        for size in self.shape:
            count *= max(size, 0)
        return count * _BITS[self.dtype] // 8

    @property
    def is_cache(self) -> bool:
        """Whether this tensor is a cache of the engine, which is both an input and an output of a
        call at the same address."""
        return self.name.startswith(("key_", "value_"))


class Layer(NamedTuple):
    """A kernel of a plan."""

    name: str
    profile: int
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def is_attention(self) -> bool:
        return "_mha_" in self.name

    @property
    def parts(self) -> list[Tensor]:
        """The caches whose first slots this layer copies. The number of copied slots equals the
        number of columns of the mask, and the log shows both as -1."""
        caches = [
            tensor for tensor in self.inputs if tensor.is_cache and tensor not in self.outputs
        ]
        return (
            caches
            if all(-1 in tensor.shape for tensor in self.outputs) and not self.is_attention
            else []
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes that a call reads and writes. Updated caches and tables are not
        counted, because a call uses only a few of their rows. Bytes that depend on the number of
        slots that attention reads are not counted either."""
        read = [tensor for tensor in self.inputs if tensor not in (*self.outputs, *self.parts)]
        written = [tensor for tensor in self.outputs if not tensor.is_cache]
        tables = () if "Gath" in self.name else self.constants
        return sum(tensor.nbytes for tensor in (*read, *tables, *written))


def build_layers(directory: Path, *options: object) -> tuple[Manifest, dict[str, list[Layer]]]:
    """Build the plans of an engine directory. Returns its manifest and the layers of each plan."""
    lists: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Layers:"):
                lists.append(record.getMessage())

    logger = logging.getLogger("eesd.tensorrt")
    recorder = Recorder()
    before = logger.level, logger.propagate
    logger.addHandler(recorder)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        succeed(build_main, directory, *options)
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    manifest = load_manifest(directory)
    return manifest, {
        graph.file: parse(text) for graph, text in zip(manifest.graphs, lists, strict=True)
    }


def parse(text: str) -> list[Layer]:
    """Returns the layers of a list in the builder's log. Anything that does not look like a layer
    is an error, because it means that the format has changed."""
    lines = [line for line in text.splitlines() if line.startswith("Name: ")]
    assert lines, text[:200]
    return [_layer(line) for line in lines]


def _layer(line: str) -> Layer:
    found = _LAYER.match(line)
    assert found, line
    profile = re.search(r"_myl(\d+)_\d+$", found[1])
    assert profile, found[1]
    return Layer(found[1], int(profile[1]), *(_tensors(part) for part in found.group(3, 4, 5)))


def _tensors(text: str) -> tuple[Tensor, ...]:
    found = _TENSOR.findall(text)
    assert len(found) == text.count("{ Name: "), text
    return tuple(
        Tensor(
            re.sub(r" \[profile \d+\]$", "", name),
            tuple(int(size) for size in shape.split(",") if size),
            dtype,
        )
        for name, shape, dtype in found
    )


def parts(layers: Sequence[Layer]) -> list[Tensor]:
    """Returns the caches whose first slots are copied. An attention then reads the copy."""
    copied = [(cache, layer.outputs) for layer in layers for cache in layer.parts]
    read = {tensor.name for layer in layers if layer.is_attention for tensor in layer.inputs}
    assert all(tensor.name in read for _, outputs in copied for tensor in outputs)
    return [cache for cache, _ in copied]


def traffic(layers: Sequence[Layer], slots: int) -> int:
    """Returns the number of bytes that a call reads and writes if its attention reads the first
    ``slots`` slots."""
    part = sum(cache.nbytes * slots // cache.shape[2] for cache in parts(layers))
    return sum(layer.nbytes for layer in layers) + 3 * part  # read, written, and read by attention


def copies(layers: Sequence[Layer], least: int) -> list[Tensor]:
    """Returns the tensors that kernels write and that have a fixed size of at least ``least``
    bytes. The engine's caches are left out."""
    return [
        tensor
        for layer in layers
        for tensor in layer.outputs
        if tensor.nbytes >= least and not tensor.is_cache
    ]


SLOTS = 2048
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 2 * LONG_CACHE,
}
"""The model has groups of 4 heads of size 128, as in 8B models. Its weights are large compared with
the code of the kernels."""
WIDTHS_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

Built = tuple[Manifest, dict[str, list[Layer]]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """Returns a function that takes the kind of quantization and the number of slots. It gives the
    manifest of an engine directory and the layers of its plans. If the kind is ``whole``, only a
    draft of all layers is quantized."""
    root = tmp_path_factory.mktemp("layers")
    model = write_checkpoint(root / "model", {**LLAMA_70B, **SHAPE}, 1, sparse=False)

    @cache
    def build(kind: str = "none", slots: int = SLOTS) -> Built:
        directory = root / f"{kind}-{slots}"
        options = ("--exit-head", "quantized") if kind == "whole" else ("--quantize", kind)
        export_engine(model, directory, "--dtype", "float16", *options, "--max-seq-len", slots)
        return build_layers(directory)

    return build


def cache_bytes(manifest: Manifest) -> int:
    """Returns the number of bytes of the keys of a layer. The values have the same number of
    bytes."""
    return 2 * manifest.geometry.num_kv_heads * manifest.geometry.head_dim * manifest.gpu_slots


def weights_read(manifest: Manifest, graph: GraphInfo) -> int:
    """Returns the number of bytes of the weights that a call reads. The embedding table and the
    rotary tables are not counted."""
    tables = {EMBEDDINGS, *ROTARY_TABLES}
    return sum(
        weight.nbytes for name, weight in weights_of(manifest, graph).items() if name not in tables
    )


def profile(layers: list[Layer], number: int) -> list[Layer]:
    return [layer for layer in layers if layer.profile == number]


@pytest.mark.parametrize("kind", ["none", "whole"])
def test_a_draft_step_reads_weights_and_caches_once_where_they_are(
    built: Callable[..., Built], kind: str
) -> None:
    manifest, plans = built(kind)
    layers = plans["draft.onnx"]
    size = cache_bytes(manifest)
    assert {layer.profile for layer in layers} == {0}
    assert copies(layers, size) == parts(layers) == []
    assert traffic(layers, manifest.gpu_slots) == pytest.approx(
        weights_read(manifest, manifest.draft) + 4 * size, rel=0.05
    )


@pytest.mark.parametrize("slots", slow_but([SLOTS, 2 * LONG_CACHE], SLOTS))
def test_a_pass_of_verify_copies_the_slots_it_sees_once_and_for_no_head_twice(
    built: Callable[..., Built], slots: int
) -> None:
    """TensorRT-RTX's attention for several nodes needs the keys of a slot to be adjacent
    (docs/decisions/0068)."""
    manifest, plans = built(slots=slots)
    size = cache_bytes(manifest)
    weights = weights_read(manifest, manifest.verify[0])
    for number in (0, 1):
        layers = profile(plans["verify.onnx"], number)
        assert (
            copies(layers, size) == [] and [cache.nbytes for cache in parts(layers)] == [size] * 4
        )
        for seen in attended_slots(manifest, manifest.verify[0]):
            copied = 4 * size * seen // manifest.gpu_slots
            assert traffic(layers, seen) == pytest.approx(weights + 3 * copied, rel=0.05)


def test_a_draft_with_a_long_cache_copies_the_slots_it_sees_for_no_head_twice(
    built: Callable[..., Built],
) -> None:
    """No one-node attention can read a long cache in place."""
    manifest, plans = built(slots=2 * LONG_CACHE)
    layers = plans["draft.onnx"]
    size = cache_bytes(manifest)
    assert copies(layers, size) == [] and [cache.nbytes for cache in parts(layers)] == [size] * 4
    assert sum(layer.is_attention for layer in layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("slots", [4096, 2 * LONG_CACHE])
def test_a_pass_over_a_text_moves_little_more_than_weights_and_the_filled_slots(
    tmp_path: Path, slots: int
) -> None:
    """The model has the widths of an 8B model. A layer therefore has the same ratio of weights to
    caches as the whole model."""
    model = write_checkpoint(
        tmp_path / "model", {**LLAMA_70B, **SHAPE, **WIDTHS_8B}, 1, sparse=False
    )
    export_engine(model, tmp_path / "plans", "--dtype", "float16", "--max-seq-len", slots)
    manifest, plans = build_layers(tmp_path / "plans")
    graph = manifest.verify[0]
    nodes = manifest.max_tree_nodes + 1
    for text in (1000, 3000):
        seen = next(some for some in attended_slots(manifest, graph) if some >= text + nodes)
        least = (
            weights_read(manifest, graph) + 4 * cache_bytes(manifest) * text // manifest.gpu_slots
        )
        assert traffic(profile(plans[graph.file], 0), seen) < 1.15 * least


@pytest.mark.parametrize("kind", slow_but(["int8", "int4", "whole"], "int8", "whole"))
def test_no_kernel_writes_a_dequantized_weight(built: Callable[..., Built], kind: str) -> None:
    manifest, plans = built(kind)
    least = (
        2
        * manifest.geometry.hidden_size
        * 2
        * manifest.geometry.num_kv_heads
        * manifest.geometry.head_dim
    )
    levels = "Int4" if kind == "whole" else kind.title()
    for graph in [manifest.draft] if kind == "whole" else manifest.graphs:
        cached = copies(plans[graph.file], cache_bytes(manifest))
        assert copies(plans[graph.file], least) == cached and {
            tensor.nbytes for tensor in cached
        } <= {cache_bytes(manifest)}
        read = [
            tensor
            for layer in plans[graph.file]
            for tensor in layer.constants
            if tensor.dtype == levels
        ]
        assert sum(tensor.nbytes for tensor in read) > 0.5 * weight_bytes(manifest, graph)


@pytest.mark.parametrize("kind", slow_but(["none", "int8", "int4"], "none", "int8"))
def test_attention_is_one_kernel_in_every_layer_and_profile(
    built: Callable[..., Built], kind: str
) -> None:
    _, plans = built(kind)
    assert sum(layer.is_attention for layer in plans["draft.onnx"]) == 2
    assert [
        sum(layer.is_attention for layer in profile(plans["verify.onnx"], number))
        for number in (0, 1)
    ] == [2, 2]


@pytest.mark.slow
def test_attention_that_may_be_built_from_parts_keeps_the_kernels_that_there_are(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest does not promise any kernels, so a plan is only slower if a kernel does not
    exist."""
    directory = export_engine(
        family_dir("qwen2"),
        tmp_path / "plans",
        "--dtype",
        "float16",
        "--max-seq-len",
        64,
        "--no-check",
    )
    manifest, plans = build_layers(directory)
    assert all(plan.fused_attentions for plan in manifest.plans.values())
    monkeypatch.setattr(build_plans, "build", partial(build_plans.build, attempts=(False,)))
    manifest, others = build_layers(directory, "--force")
    assert not any(plan.fused_attentions for plan in manifest.plans.values())
    for name, layers in plans.items():
        kernels = [
            [layer.profile for layer in some if layer.is_attention]
            for some in (layers, others[name])
        ]
        assert kernels[0] == kernels[1] != []


@pytest.mark.parametrize("kind", slow_but(["none", "int8", "int4"], "none", "int8"))
def test_plans_are_hardly_larger_than_their_weights(built: Callable[..., Built], kind: str) -> None:
    """A profile of a different kind would store the weights twice."""
    manifest, _ = built(kind)
    for graph in manifest.graphs:
        assert manifest.plans[graph.file].size < 1.1 * weight_bytes(manifest, graph) + 3_000_000, (
            graph.file
        )
