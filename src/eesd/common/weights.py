"""The rules for weights: which ones a model, an exit head and a graph have, and how an engine directory stores each.

All code that writes, reads, links, splits or counts weights uses these rules. The module needs no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from eesd.common.geometry import ExitConfig, Geometry

DTYPES = ("float32", "float16", "bfloat16")
"""Element types of engines."""
QUANTIZED = ("int8", "int4")
"""Types that linear weights can be quantized to."""
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
BLOCK = 32
"""Number of consecutive inputs of one output that share a scale. ONNX Runtime and TensorRT have kernels for 32."""

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
EXIT_HEAD = "exit_head."
"""Prefix of the exit head's weights in the graphs."""
ROTARY_TABLES = ("cos", "sin")
SCALES = ".scales"
"""Suffix that turns the name of a quantized weight into the name of its scales."""

_KV_MODULES = ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
"""The modules of a block that compute its keys and values."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """Quantization of the linear weights of an engine directory.

    The scales have the directory's element type. A weight whose number of inputs is not a multiple of ``block`` is not
    quantized.

    Attributes:
        weights: ``int8`` or ``int4``.
        block: Number of consecutive inputs of one output that share a scale.
    """

    weights: str
    block: int


@dataclass(frozen=True)
class StoredWeight:
    """How an engine directory stores one weight.

    Attributes:
        name: Name in the graphs: the checkpoint's name, or ``exit_head.`` followed by the exit head's.
        shape: Shape in the checkpoint; [out, in] for a linear layer.
        dtype: Element type of the weight, or of its scales: the directory's, but float32 for the rotary tables.
        transposed: Whether the weight is stored as [in, out], the layout that MatMul takes. Linked weights are not.
        quantization: None if the weight is stored in ``dtype``.
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
        """[in / block, out]; only for quantized weights."""
        assert self.quantization is not None
        return self.shape[1] // self.quantization.block, self.shape[0]

    @property
    def tensors(self) -> dict[str, int]:
        """Name and bytes of each stored tensor: the weight and, if it is quantized, its scales."""
        count = prod(self.shape)
        if self.quantization is None:
            return {self.name: count * BITS[self.dtype] // 8}
        scales = prod(self.scales_shape) * BITS[self.dtype] // 8
        return {self.name: count * BITS[self.quantization.weights] // 8, self.name + SCALES: scales}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(self.tensors.values())


def is_linear(name: str) -> bool:
    """Whether a weight belongs to a linear layer. The embedding table does not, even if the LM head is tied to it."""
    return name.endswith(("_proj.weight", LM_HEAD))


def stored_weight(
    name: str, shape: Iterable[int], dtype: str, quantization: Quantization | None, linked: bool = False
) -> StoredWeight:
    """Decide how an engine directory stores a weight.

    Args:
        name: Name in the graphs.
        shape: Shape in the checkpoint.
        dtype: Element type of the directory.
        quantization: Quantization of the directory's linear weights.
        linked: Whether the weight stays in the checkpoint's own file, and so in its layout.
    """
    shape = tuple(shape)
    if name in ROTARY_TABLES:
        return StoredWeight(name, shape, "float32")  # rounded where they are used; see the module that is traced
    if linked or not is_linear(name):
        return StoredWeight(name, shape, dtype)
    whole_blocks = quantization is not None and shape[1] % quantization.block == 0
    return StoredWeight(name, shape, dtype, True, quantization if whole_blocks else None)


def lm_head_name(geometry: Geometry) -> str:
    """Name of the base model's LM head; the embedding table if the two are tied."""
    return EMBEDDINGS if geometry.tied_embeddings else LM_HEAD


def block_shapes(geometry: Geometry) -> dict[str, Shape]:
    """Name and shape of every weight of one decoder block, as in a Hugging Face checkpoint."""
    hidden, inner, head = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
    widths = {"q": geometry.num_heads * head, "k": geometry.num_kv_heads * head, "v": geometry.num_kv_heads * head}
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for part, width in widths.items():
        shapes |= _linear(f"self_attn.{part}_proj", hidden, width, geometry.qkv_bias)
    shapes |= _linear("self_attn.o_proj", widths["q"], hidden, geometry.output_bias)
    if geometry.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    for name, inputs, outputs in (("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)):
        shapes |= _linear(f"mlp.{name}", inputs, outputs, geometry.mlp_bias)
    return shapes


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def layer_shapes(geometry: Geometry, layers: Iterable[int]) -> dict[str, Shape]:
    """Name and shape of every weight of some base layers."""
    block = block_shapes(geometry)
    return {f"model.layers.{index}.{name}": shape for index in layers for name, shape in block.items()}


def model_shapes(geometry: Geometry) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of the base model must have."""
    table = (geometry.vocab_size, geometry.hidden_size)
    ends: dict[str, Shape] = {EMBEDDINGS: table, FINAL_NORM: (geometry.hidden_size,), lm_head_name(geometry): table}
    return ends | layer_shapes(geometry, range(geometry.num_layers))


def exit_head_shapes(geometry: Geometry, exit_config: ExitConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of the exit head must have."""
    block = block_shapes(geometry)
    shapes = {f"blocks.{index}.{name}": shape for index in range(exit_config.blocks) for name, shape in block.items()}
    shapes["norm.weight"] = (geometry.hidden_size,)
    return shapes | ({LM_HEAD: (geometry.vocab_size, geometry.hidden_size)} if exit_config.own_lm_head else {})


def graph_shapes(
    geometry: Geometry, exit_config: ExitConfig, slots: int, layers: Iterable[int], draft: bool
) -> dict[str, Shape]:
    """Name and shape of every weight that a graph uses.

    Args:
        geometry: Geometry of the base model.
        exit_config: Configuration of the exit head.
        slots: S, the number of rows of the rotary tables.
        layers: Base layers of the graph, in order.
        draft: True for the draft graph, False for verify or one of its stages.
    """
    layers, base = list(layers), model_shapes(geometry)
    shapes: dict[str, Shape] = dict.fromkeys(ROTARY_TABLES, (slots, geometry.head_dim // 2))
    shapes |= layer_shapes(geometry, layers)
    head = {EXIT_HEAD + name: shape for name, shape in exit_head_shapes(geometry, exit_config).items()}
    ends = []
    if draft:
        shapes |= head
        ends = [EMBEDDINGS] if exit_config.own_lm_head else [EMBEDDINGS, lm_head_name(geometry)]
    else:
        if layers[0] == 0:
            shapes |= _written_by_verify(head, exit_config.blocks)
            ends += [EMBEDDINGS]
        if layers[-1] == geometry.num_layers - 1:
            ends += [FINAL_NORM, lm_head_name(geometry)]
    return shapes | {name: base[name] for name in ends}


def _written_by_verify(head: dict[str, Shape], blocks: int) -> dict[str, Shape]:
    """The weights with which verify writes the exit caches: all blocks, but of the last only its keys and values."""
    last = f"{EXIT_HEAD}blocks.{blocks - 1}."
    names = [name for name in head if name.startswith(f"{EXIT_HEAD}blocks.")]
    used = [name for name in names if not name.startswith(last) or name.removeprefix(last).startswith(_KV_MODULES)]
    return {name: head[name] for name in used}
