"""The weights of a model, an exit head and a graph. The module also defines how an engine directory
stores them. All code that writes, reads, links, splits or counts weights uses these rules. The
module needs no torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from eesd.common.architecture import CHOICE_BIAS, Model
from eesd.common.checks import shown
from eesd.common.errors import EESDError, refused
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.manifest import MANIFEST_FILE, GraphInfo, Manifest
from eesd.common.quantization import (
    BITS,
    DRAFT,
    EXIT_HEAD,
    LM_HEAD,
    PACKED,
    UNQUANTIZED,
    Quantization,
    Quantizations,
    Shape,
    is_linear,
    parts_of,
)
from eesd.common.shapes import NO_HEAD, Shapes, block_weights, graph_needs

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
DRAFT_VOCAB = "draft_vocab"
"""Name, in the exit head, of the draft vocabulary's token ids. Column i of the head's logits
belongs to the token with the i-th id."""
ROTARY_TABLES = ("cos", "sin")
SCALES = ".scales"
"""Suffix that turns the name of a quantized weight into the name of its scales."""
ZEROS = ".zeros"
"""Suffix that turns the name of a quantized weight into the name of its zero points."""
MINIMUMS = ".minimums"
"""Suffix that turns the name of a quantized weight into the name of its minimums."""
FACTOR = ".factor"
"""Suffix that turns the name of a quantized weight into the name of the factor of its scales."""

HEAD_TABLES = (f"{EXIT_HEAD}cos", f"{EXIT_HEAD}sin")
"""The rotary tables of an EAGLE-3 head, whose frequencies differ from the model's."""
DEEP = f"{EXIT_HEAD}deep"
"""Prefix of the names of weights that compute deep states."""

OUTPUTS = 0
INPUTS = 1
"""The sides of a weight [out, in] along which ranks can split it."""
_SPLIT = {
    OUTPUTS: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "state_proj"),
    INPUTS: ("o_proj", "down_proj", "deep_in_proj"),
}
"""Layers that ranks split, by side. A deep state is split like keys and values."""

_IN_BLOCK = re.compile(r"(?:layers|blocks)\.([0-9]+)\.")
"""Matches the prefix of a weight's name that ends with the number of its block."""


@dataclass(frozen=True)
class StoredWeight:
    """How an engine directory stores one weight.

    Attributes:
        name: Name in the graphs. It is the checkpoint's name, or ``exit_head.`` followed by the
            name in the exit head.
        shape: Shape in the checkpoint. It is [out, in] for a linear layer.
        dtype: Element type of the weight, or of its scales unless the quantization specifies
            another. This is the directory's element type for most weights. It is float32 for rotary
            tables, for wide norms, and for the biases that are added to choose experts. It is int64
            for the draft vocabulary.
        transposed: Whether the weight is stored as [in, out], the layout of MatMul. The embedding
            table never has this layout.
        quantization: Quantization of the weight, or None if the weight is stored in ``dtype``.
    """

    name: str
    shape: Shape
    dtype: str
    transposed: bool = False
    quantization: Quantization | None = None

    @property
    def stored_shape(self) -> Shape:
        """Shape in the engine directory."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def scales_shape(self) -> Shape:
        """Shape of scales, zero points and minimums. It is [in / block, out], or [out, in / block]
        if the weight is not transposed.

        Only quantized weights have it.
        """
        assert self.quantization is not None
        shape = self.shape[0], self.shape[1] // self.quantization.block
        return shape[::-1] if self.transposed else shape

    @property
    def scales_dtype(self) -> str:
        """Element type of scales and minimums. Only quantized weights have it."""
        assert self.quantization is not None
        return self.quantization.scales or self.dtype

    @property
    def tensors(self) -> dict[str, int]:
        """Name and bytes of each stored tensor. These are the weight and, if it is quantized, its
        scales, zero points, minimums and factor."""
        count = prod(self.shape)
        if self.quantization is None:
            return {self.name: count * BITS[self.dtype] // 8}
        bits = BITS[self.quantization.weights]
        blocks = prod(self.scales_shape)
        scales = blocks * BITS[self.scales_dtype] // 8
        tensors = {self.name: count * bits // 8, self.name + SCALES: scales}
        if self.quantization.minimums:
            return tensors | {self.name + MINIMUMS: scales}
        if self.quantization.factor:
            return tensors | {self.name + FACTOR: BITS[self.dtype] // 8}
        if self.quantization.zero_points:
            return tensors | {self.name + ZEROS: (blocks * bits + 7) // 8}
        return tensors

    @property
    def nbytes(self) -> int:
        """Number of bytes of all its tensors."""
        return sum(self.tensors.values())

    def keeps_levels(self, ranks: int = 1) -> bool:
        """Whether torch can keep the weight as levels on a GPU, split over ``ranks``. This works
        for linear layers if no rank begins within a block."""
        of = self.quantization
        if of is None or not self.transposed or not of.integers:
            return False
        if ranks == 1 or split_side(self.name) == OUTPUTS:
            return True
        if self.name.startswith(DEEP):  # ranks split its rows by heads of keys and values
            return False
        return split_side(self.name) is None or self.shape[1] // of.block % ranks == 0


def stored_weight(
    name: str,
    shape: Iterable[int],
    dtype: str,
    quantization: Quantizations,
    linked: bool = False,
    wide_norms: bool = False,
) -> StoredWeight:
    """Decide how an engine directory stores a weight.

    Args:
        name: Name in the graphs.
        shape: Shape in the checkpoint.
        dtype: Element type of the directory.
        quantization: Quantization of the directory's weights.
        linked: Whether the weight stays in the checkpoint's file. It then keeps the checkpoint's
            layout.
        wide_norms: Whether norms are float32, as in :class:`~eesd.common.geometry.Geometry`.
    """
    shape = tuple(shape)
    is_wide = name in (*ROTARY_TABLES, *HEAD_TABLES) or name.endswith(
        (f"{CHOICE_BIAS}.weight", "factors.weight")
    )
    if is_wide or (wide_norms and name.endswith(("norm.weight", "norm.bias"))):
        # These weights stay in float32, and are rounded at each use.
        return StoredWeight(name, shape, "float32")
    if name == EXIT_HEAD + DRAFT_VOCAB:
        return StoredWeight(name, shape, "int64")
    if linked:
        return StoredWeight(name, shape, dtype)
    return StoredWeight(name, shape, dtype, is_linear(name), quantization.of(name, shape))


def packed_name(parts: Sequence[str]) -> str:
    """Name of the packed form of weights or biases of a block. Raises KeyError if there is no
    packed form."""
    modules = tuple(f".{part.split('.')[-2]}." for part in parts)
    packed = {names: name for name, names in PACKED.items()}[modules]
    return parts[0].replace(modules[0], packed)


def split_side(name: str) -> int | None:
    """The side along which ranks split a layer's weight or bias, or None if each rank has the whole
    weight."""
    layer = parts_of(f".{name}")[0].split(".")[-2]
    return next((side for side, layers in _SPLIT.items() if layer in layers), None)


def part_shapes(parts: Sequence[str], geometry: Geometry, exit_config: ExitConfig) -> list[Shape]:
    """Shapes of weights or biases of a block of the model or of a head."""
    model = Model(geometry, exit_config)
    found = _IN_BLOCK.search(parts[0])
    assert found
    number = int(found[1])
    of = model.exit_block(number) if parts[0].startswith(EXIT_HEAD) else model.layer(number)
    shapes = block_weights(replace(of, prefix=""))
    return [shapes[_IN_BLOCK.split(part)[-1]] for part in parts]


def can_be_packed(
    parts: Sequence[str], shape_of: Callable[[str], Shape], quantization: Quantizations
) -> bool:
    """Whether the weights or biases of some layers can be packed. This requires that their weights
    are quantized alike.

    Args:
        parts: Names of the weights or biases.
        shape_of: Returns the shape of a weight by its name.
        quantization: Quantization of the directory.
    """
    weights = [f"{part.rpartition('.')[0]}.weight" for part in parts]
    return len({quantization.of(weight, shape_of(weight)) for weight in weights}) == 1


def _packed_shapes(shapes: Mapping[str, Shape], quantization: Quantizations) -> dict[str, Shape]:
    """Returns the shapes, in which packed layers replace their parts."""
    left = dict(shapes)
    apart = set[str]()
    for packed, modules in PACKED.items():
        for name in [name for name in left if modules[0] in name]:
            whole = name.replace(modules[0], packed)
            names = parts_of(whole)
            if not left.keys() >= set(names) or apart & set(names):
                continue
            if not can_be_packed(names, shapes.__getitem__, quantization):
                apart |= set(names)  # if queries cannot be packed, keys and values stay apart
                continue
            parts = [left.pop(part) for part in names]
            left[whole] = (sum(shape[0] for shape in parts), *parts[0][1:])
    return left


def lm_head_name(geometry: Geometry) -> str:
    """Name of the base model's LM head. If it is tied to the embedding table, this is the name of
    the table."""
    return EMBEDDINGS if geometry.tied_embeddings else LM_HEAD


def layer_shapes(geometry: Geometry, layers: Iterable[int]) -> dict[str, Shape]:
    """Name and shape of every weight of some base layers."""
    shapes: dict[str, Shape] = {}
    for layer in layers:
        shapes |= block_weights(Model(geometry, NO_HEAD).layer(layer))
    return shapes


def model_shapes(geometry: Geometry) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of the base model must have."""
    shapes = dict(graph_needs(geometry, NO_HEAD, range(geometry.num_layers)).weights)
    if geometry.tied_embeddings:
        del shapes[LM_HEAD]
    return shapes


def exit_head_shapes(geometry: Geometry, exit_config: ExitConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that an exit head has, in a checkpoint and in the graphs."""
    every: dict[str, Shape] = {}
    for layers in (range(geometry.num_layers), None):
        every |= graph_needs(geometry, exit_config, layers).weights
    shapes = {
        name.removeprefix(EXIT_HEAD): shape
        for name, shape in every.items()
        if name.startswith(EXIT_HEAD)
    }
    if exit_config.draft_vocab:
        shapes[DRAFT_VOCAB] = (exit_config.draft_vocab,)
    return shapes


def graph_shapes(
    geometry: Geometry,
    exit_config: ExitConfig,
    slots: int,
    layers: range,
    draft: bool,
    dtype: str = "float32",
    quantization: Quantizations = UNQUANTIZED,
    packed: bool = True,
) -> dict[str, Shape]:
    """Name and shape of every weight that a graph uses.

    Args:
        geometry: Geometry of the base model.
        exit_config: Configuration of the exit head.
        slots: The number of rows of the rotary tables, S.
        layers: Base layers of the graph, in order.
        draft: True for the draft graph, False for the verify graph or one of its stages.
        dtype: Element type of the directory.
        quantization: Quantization of the directory.
        packed: Whether layers that read the same input and are quantized alike are packed. Linked
            weights are never packed.
    """
    needs = graph_needs(geometry, exit_config, None if draft else layers)
    shapes = dict(needs.weights)
    if needs.rotates:
        shapes |= dict.fromkeys(ROTARY_TABLES, (slots, geometry.rotary_columns))
    if exit_config.eagle:
        shapes |= dict.fromkeys(HEAD_TABLES, (slots, exit_config.eagle.block.rotary_columns))
    if draft and exit_config.draft_vocab:
        shapes[EXIT_HEAD + DRAFT_VOCAB] = (exit_config.draft_vocab,)
    if packed:
        shapes = _packed_shapes(shapes, quantization)
    return {
        graph_name(name, shape, geometry, draft, dtype, quantization): shape
        for name, shape in shapes.items()
    }


def graph_name(
    name: str,
    shape: Shape,
    geometry: Geometry,
    draft: bool,
    dtype: str,
    quantization: Quantizations,
) -> str:
    """The name that a module's parameter has in a graph.

    Args:
        name: Name of the parameter, or of several packed parameters.
        shape: Its shape.
        geometry: Geometry of the base model.
        draft: True for the draft graph.
        dtype: Element type of the directory.
        quantization: Quantization of the directory.
    """
    own_table = name == LM_HEAD and geometry.tied_embeddings and EMBEDDINGS in quantization.tensors
    if draft and not own_table:
        name = quantization.draft_name(name, shape, dtype)
    tied = name == LM_HEAD and geometry.tied_embeddings and quantization.of(name, shape) is None
    return EMBEDDINGS if tied else name


def checkpoint_names(name: str, geometry: Geometry) -> tuple[str, ...]:
    """Names of the tensors of a checkpoint or exit head that form a weight of a graph."""
    name = name.removeprefix(DRAFT)
    return (lm_head_name(geometry),) if name == LM_HEAD else parts_of(name)


def needs_of(manifest: Manifest, graph: GraphInfo) -> Shapes:
    """The weights and caches that a graph needs."""
    layers = None if graph == manifest.draft else manifest.base_layers(graph)
    return graph_needs(manifest.geometry, manifest.exit_head, layers)


def weights_of(manifest: Manifest, graph: GraphInfo) -> dict[str, StoredWeight]:
    """The weights that ``graph`` uses, by name. Graphs that share a weight use the same name for
    it.

    Raises:
        EESDError: A single tensor for which the manifest gives levels is not in the model, or does
            not consist of whole blocks.
    """
    _check_tensors(manifest)
    geometry = manifest.geometry
    storage = (manifest.dtype, manifest.quantization)
    shapes = graph_shapes(
        geometry,
        manifest.exit_head,
        manifest.max_seq_len,
        manifest.base_layers(graph),
        graph == manifest.draft,
        *storage,
        packed=not manifest.linked,
    )
    return {
        name: stored_weight(name, shape, *storage, wide_norms=geometry.wide_norms)
        for name, shape in shapes.items()
    }


def _check_tensors(manifest: Manifest) -> None:
    """Check the single tensors for which the manifest gives levels."""
    tensors = manifest.quantization.tensors
    shapes = model_shapes(manifest.geometry) if tensors else {}
    for name, one in tensors.items():
        whole = (
            is_linear(name) or (name == EMBEDDINGS and one.weights == "int8")
        ) and name in shapes
        if not whole or shapes[name][1] % one.block or manifest.linked:
            raise EESDError(
                f"{MANIFEST_FILE} is damaged (quantization.tensors.{shown(name)}); "
                "export the model again."
            )


def read_graph(path: Path) -> Any:
    """Read a graph without its weights, which stay in their files.

    Returns:
        An ``onnx.ModelProto``.

    Raises:
        EESDError: onnx cannot read it.
    """
    import onnx

    with refused(lambda _: f"onnx cannot read {path}; export the model again."):
        return onnx.load(path, load_external_data=False)


def weight_bytes(manifest: Manifest, graph: GraphInfo) -> int:
    """Bytes of the weights that ``graph`` uses, including scales, zero points and minimums."""
    return sum(weight.nbytes for weight in weights_of(manifest, graph).values())
