"""The layers of plans, from the builder's log: even without a GPU, TensorRT-RTX lists a plan's
kernels and their tensors."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eesd.common.manifest import Manifest, load_manifest
from eesd.export.build import main as build_main
from support.command import succeed

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
        """Size in bytes; 0 if it depends on the nodes of the call, which is little."""
        count = 1
        for size in self.shape:
            count *= max(size, 0)
        return count * _BITS[self.dtype] // 8

    @property
    def is_cache(self) -> bool:
        """Whether it is a cache of the engine: input and output of a call at one address."""
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
        """The caches whose first slots it copies: as many as the mask has columns. Both sizes are
        -1 in the log."""
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
        """Bytes that a call reads and writes. Updated caches and tables are touched in a few rows
        only. Bytes that depend on the slots that attention reads do not count."""
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
    """The layers of a list in the builder's log. Anything that does not look like a layer is an
    error: the format has changed."""
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
    """The caches whose first slots are copied for an attention, which reads the copy."""
    copied = [(cache, layer.outputs) for layer in layers for cache in layer.parts]
    read = {tensor.name for layer in layers if layer.is_attention for tensor in layer.inputs}
    assert all(tensor.name in read for _, outputs in copied for tensor in outputs)
    return [cache for cache, _ in copied]


def traffic(layers: Sequence[Layer], slots: int) -> int:
    """All bytes that a call reads and writes if its attention reads ``slots`` of the first
    slots."""
    part = sum(cache.nbytes * slots // cache.shape[2] for cache in parts(layers))
    return sum(layer.nbytes for layer in layers) + 3 * part  # read, written, and read by attention


def copies(layers: Sequence[Layer], least: int) -> list[Tensor]:
    """Tensors of a fixed size of at least ``least`` bytes that kernels write, except the engine's
    caches."""
    return [
        tensor
        for layer in layers
        for tensor in layer.outputs
        if tensor.nbytes >= least and not tensor.is_cache
    ]
