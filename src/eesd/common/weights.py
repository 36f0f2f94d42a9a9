"""How each weight lies in an engine directory: its shape there, its element type, its bytes.

This is the one rule for everything that writes, reads, links, splits or counts weights. It needs no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from eesd.common.geometry import ExitConfig, Geometry

DTYPES = ("float32", "float16", "bfloat16")
"""Element types of engines."""
QUANTIZED = ("int8", "int4")
"""What linear weights may be quantized to."""
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
BLOCK = 32
"""Inputs of an output that share a scale: what the kernels of ONNX Runtime and TensorRT take."""

EMBEDDINGS = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
EXIT_HEAD = "exit_head."
"""Prefix of the exit head's weights in the graphs."""
ROTARY_TABLES = ("cos", "sin")
SCALES = ".scales"
"""Suffix of the name of a quantized weight's scales."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """What linear weights are quantized to: ``weights`` is ``int8`` or ``int4``; ``block`` inputs of an output share one scale.

    The scales are of the directory's element type. A weight whose inputs are not a multiple of ``block`` is not quantized.
    """

    weights: str
    block: int


@dataclass(frozen=True)
class StoredWeight:
    """One weight of an engine directory.

    Attributes:
        name: Its name in the graphs: the checkpoint's, or ``exit_head.`` + the exit head's.
        shape: Its shape in the checkpoint; [out, in] for a linear layer.
        dtype: Element type of the directory; also that of the scales.
        transposed: Whether it is stored as [in, out], as MatMul takes it. Linked weights are not.
        quantization: None where it is stored in ``dtype``.
    """

    name: str
    shape: Shape
    dtype: str
    transposed: bool = False
    quantization: Quantization | None = None

    @property
    def stored_shape(self) -> Shape:
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def scales_shape(self) -> Shape:
        """[in / block, out]; only for quantized weights."""
        assert self.quantization is not None
        return self.shape[1] // self.quantization.block, self.shape[0]

    @property
    def tensors(self) -> dict[str, int]:
        """Name and bytes of each tensor that is stored for this weight: itself and, if it is quantized, its scales."""
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
    """Whether a weight is that of a linear layer. The embedding table is not, also where it is tied to the LM head."""
    return name.endswith(("_proj.weight", LM_HEAD))


def stored_weight(
    name: str, shape: Iterable[int], dtype: str, quantization: Quantization | None, linked: bool = False
) -> StoredWeight:
    """The rule: linear weights are transposed, and quantized where blocks fit; linked ones stay as the checkpoint has them."""
    shape = tuple(shape)
    if linked or not is_linear(name):
        return StoredWeight(name, shape, dtype)
    fits = quantization is not None and shape[1] % quantization.block == 0
    return StoredWeight(name, shape, dtype, True, quantization if fits else None)


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


KV_WEIGHTS = ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
"""The modules of a block that make its keys and values."""


def graph_shapes(
    geometry: Geometry, exit_config: ExitConfig, slots: int, layers: Iterable[int], draft: bool
) -> dict[str, Shape]:
    """Name and shape of every weight that a graph uses.

    Args:
        geometry: Of the base model.
        exit_config: Of the exit head.
        slots: S, the rows of the rotary tables.
        layers: Base layers of the graph.
        draft: Whether it is the draft graph; else verify or a stage of it.
    """
    layers, block = list(layers), block_shapes(geometry)
    hidden, table = (geometry.hidden_size,), (geometry.vocab_size, geometry.hidden_size)
    shapes: dict[str, Shape] = dict.fromkeys(ROTARY_TABLES, (slots, geometry.head_dim // 2))
    if layers[0] == 0:
        shapes[EMBEDDINGS] = table
        for index in range(exit_config.blocks):
            # Verify takes no more of the last exit block than its keys and values.
            whole = draft or index < exit_config.blocks - 1
            names = [name for name in block if whole or name.startswith(KV_WEIGHTS)]
            shapes |= {f"{EXIT_HEAD}blocks.{index}.{name}": block[name] for name in names}
    for index in layers:
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    if draft:
        shapes[f"{EXIT_HEAD}norm.weight"] = hidden
    elif layers[-1] == geometry.num_layers - 1:
        shapes["model.norm.weight"] = hidden
    else:
        return shapes
    own = draft and exit_config.own_lm_head
    lm_head = EXIT_HEAD + LM_HEAD if own else EMBEDDINGS if geometry.tied_embeddings else LM_HEAD
    return shapes | {lm_head: table}
