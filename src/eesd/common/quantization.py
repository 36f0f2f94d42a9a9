"""The quantization of an engine directory's weights, and the weight names on which it depends. The
module needs no torch."""

from dataclasses import dataclass, field

DTYPES = ("float32", "float16", "bfloat16")
"""Element types of engines."""
QUANTIZED = ("int8", "int4", "fp8", "nvfp4")
"""Values of ``--quantize``. They are formats of linear weights."""
FP8 = "float8e4m3fn"
FP4 = "float4e2m1"
"""ONNX names of small floating-point types. The first has 8 bits and holds -448 to 448, and the
second has 4 bits and holds -6 to 6."""
LEVELS = ("int8", "int4", "uint4", FP8, FP4)
"""Element types of quantized weights. Unsigned types have zero points or minimums."""
BITS = {
    "int64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    FP8: 8,
    "int4": 4,
    "uint4": 4,
    FP4: 4,
}
BLOCK = 32
"""Number of consecutive inputs of one output that share a scale. ONNX Runtime and TensorRT have
kernels for 32."""
BLOCKS = (32, 64, 128)
"""Block sizes that a checkpoint with quantized weights may use."""
OWN_BLOCKS = (16, *BLOCKS)
"""Block sizes of a single tensor that keeps the levels of its file."""
SCALE_TYPES = ("float16", "float32")
"""Element types of scales and minimums that may differ from the directory's."""

LM_HEAD = "lm_head.weight"
EXIT_HEAD = "exit_head."
"""Name prefix of the exit head's weights in the graphs."""
DRAFT = "draft."
"""Name prefix of the draft's copies of base weights."""
PACKED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".kv_proj.": (".k_proj.", ".v_proj."),
    ".qk_proj.": (".q_proj.", ".k_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
    ".qkv_a_proj.": (".q_a_proj.", ".kv_a_proj."),
    ".in_mixed_proj.": (".in_qkv_proj.", ".in_z_proj.", ".in_b_proj.", ".in_a_proj."),
    ".in_space_proj.": (".in_qkv_proj.", ".in_z_proj.", ".in_a_proj."),
}
"""Linear layers that have the same input and are packed into one product. Each key is a part of the
packed layer's name, and its value has the corresponding parts of the layers' names, in order."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """Quantization of weights of an engine directory. The value of a weight is ``scale * (level -
    zero_point) + minimum``.

    A weight whose number of inputs is not a multiple of ``block`` is not quantized.

    Attributes:
        weights: Element type of the levels and of their zero points. It is one of :data:`LEVELS`.
        block: Number of consecutive inputs of one output that share a scale and, if there are any,
            a zero point or a minimum.
        minimums: Whether weights have minimums. If they do, they have no zero points.
        scales: Element type of scales and minimums. It is ``float16``, ``float32``, or :data:`FP8`
            with a factor for the whole weight. If it is None, they have the directory's element
            type.
    """

    weights: str
    block: int
    minimums: bool = False
    scales: str | None = None

    @property
    def zero_points(self) -> bool:
        """Whether weights have zero points."""
        return self.weights.startswith("u") and not self.minimums

    @property
    def integers(self) -> bool:
        """Whether the levels are integers."""
        return self.weights not in (FP8, FP4)

    @property
    def factor(self) -> bool:
        """Whether a weight has a further factor for all its scales."""
        return self.scales == FP8

    @property
    def name(self) -> str:
        """Name of the levels for users."""
        small = {FP8: "fp8", FP4: "nvfp4" if self.factor else "mxfp4"}
        return small.get(self.weights, self.weights)

    @property
    def description(self) -> str:
        """The scheme in words."""
        if self.factor:
            return (
                f"{self.name}, one scale of 8 bits for {self.block} inputs of an output, and a "
                "factor for all"
            )
        shared = "scale"
        if self.minimums:
            shared = "scale and minimum"
        elif self.zero_points:
            shared = "scale and zero point"
        kind = f"{self.scales} " if self.scales else ""
        return f"{self.name}, one {kind}{shared} for {self.block} inputs of an output"


FP8_WEIGHTS = Quantization(FP8, BLOCK)
"""Result of ``--quantize fp8``."""
NVFP4 = Quantization(FP4, 16, scales=FP8)
"""Result of ``--quantize nvfp4``, which is NVIDIA's format of that name."""
MXFP4 = Quantization(FP4, BLOCK, scales="float32")
"""Levels of MXFP4 (OCP Microscaling Formats 1.0), whose scales are powers of two."""
SEARCHED_INT4 = Quantization("uint4", BLOCK, minimums=True, scales="float16")
"""Result of ``--quantize int4`` for float32 weights. It has the same bytes as GGUF's Q4_1."""


@dataclass(frozen=True)
class Quantizations:
    """Quantization of the weights by their use. Weights whose quantization is None keep the
    directory's element type.

    Attributes:
        layers: Quantization of the base layers.
        head: Quantization of the base model's LM head. An LM head that is tied to the embedding
            table gets a quantized copy.
        draft: Quantization of the exit head, and of the draft's copies of base layers and LM head.
            Only drafted tokens depend on these. The draft has a copy only if the copy takes fewer
            bits than the verify graph's weight.
        tensors: Quantizations of single tensors by their checkpoint names. They take precedence
            over the quantizations above. These tensors keep the levels of the checkpoint's file,
            and the draft has no copies of them. The embedding table can be quantized only in this
            way, to 8 bits. A tied LM head is then the same tensor.
    """

    layers: Quantization | None = None
    head: Quantization | None = None
    draft: Quantization | None = None
    tensors: dict[str, Quantization] = field(default_factory=dict, hash=False, kw_only=True)

    @property
    def places(self) -> dict[str, Quantization | None]:
        """The quantizations of :attr:`layers`, :attr:`head` and :attr:`draft`, by the names that
        messages use."""
        return {"layers": self.layers, "LM head": self.head, "draft": self.draft}

    @property
    def used(self) -> tuple[Quantization, ...]:
        """The quantizations that are not None."""
        return (*(one for one in self.places.values() if one is not None), *self.tensors.values())

    def of(self, name: str, shape: Shape) -> Quantization | None:
        """Quantization of a graph's weight, by its name in the graph and its shape in the
        checkpoint.

        All parts of a packed weight have the same quantization.
        """
        own = self._own(name)
        if own is not None or not is_linear(name):
            return own
        chosen = self.head if name == LM_HEAD else self.layers
        if name.startswith((DRAFT, EXIT_HEAD)):
            chosen = self.draft
        return None if chosen is None or shape[1] % chosen.block else chosen

    def _own(self, name: str) -> Quantization | None:
        """Quantization that a weight has as a single tensor. If the weight is packed, this is the
        quantization of its first part."""
        return self.tensors.get(parts_of(name)[0])

    def draft_name(self, name: str, shape: Shape, dtype: str) -> str:
        """Name that a verify graph's weight called ``name`` has in the draft graph. It is the same
        name, or the name of the draft's copy."""
        if not is_linear(name) or name.startswith(EXIT_HEAD) or self._own(name) is not None:
            return name
        own = self.of(name, shape)
        copy = self.of(DRAFT + name, shape)
        bits = BITS[dtype if own is None else own.weights]
        return DRAFT + name if copy is not None and BITS[copy.weights] < bits else name


UNQUANTIZED = Quantizations()


def is_linear(name: str) -> bool:
    """Whether a weight belongs to a linear layer. The embedding table does not, even if the LM head
    is tied to it."""
    return name.endswith(("_proj.weight", LM_HEAD))


def parts_of(name: str) -> tuple[str, ...]:
    """Names of the weights or biases that make up a packed weight or bias. If it is not packed, the
    result is its name."""
    for packed, parts in PACKED.items():
        if packed in name:
            return tuple(name.replace(packed, part) for part in parts)
    return (name,)
