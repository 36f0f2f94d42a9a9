"""How the weights of an engine directory are quantized, and which names of weights that depends on.
Needs no torch."""

from dataclasses import dataclass, field

DTYPES = ("float32", "float16", "bfloat16")
"""Element types of engines."""
QUANTIZED = ("int8", "int4", "fp8", "nvfp4")
"""What linear weights can be quantized to."""
FP8 = "float8e4m3fn"
FP4 = "float4e2m1"
"""Small floating-point numbers, by their names in ONNX: of 8 bits, from -448 to 448, and of 4, from
-6 to 6."""
LEVELS = ("int8", "int4", "uint4", FP8, FP4)
"""Element types of quantized weights. Unsigned ones have zero points or minimums."""
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
"""Numbers that a checkpoint with quantized weights may have instead."""
OWN_BLOCKS = (16, *BLOCKS)
"""Numbers that a single tensor with the levels of its file may have."""
SCALE_TYPES = ("float16", "float32")
"""Element types that scales and minimums may have instead of the directory's."""

LM_HEAD = "lm_head.weight"
EXIT_HEAD = "exit_head."
"""Prefix of the exit head's weights in the graphs."""
DRAFT = "draft."
"""Prefix of the draft's copies of base weights."""
PACKED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".kv_proj.": (".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
"""Linear layers that read the same input, and so are one product: a part of the packed one's name,
and of theirs in order."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """Quantization of weights of an engine directory: ``scale * (level - zero_point) + minimum``.

    A weight whose number of inputs is not a multiple of ``block`` is not quantized.

    Attributes:
        weights: Element type of the levels, and of their zero points: one of :data:`LEVELS`.
        block: Number of consecutive inputs of one output that share a scale, and a zero point or a
            minimum.
        minimums: Whether weights have minimums. Then they have no zero points.
        scales: Element type of scales and minimums: ``float16`` or ``float32``, or :data:`FP8` with
            a factor for the whole weight. None: the directory's.
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
        """Whether all scales of a weight are multiplied by a factor of its own."""
        return self.scales == FP8

    @property
    def name(self) -> str:
        """What users call the levels."""
        return {FP8: "fp8", FP4: "nvfp4"}.get(self.weights, self.weights)

    @property
    def description(self) -> str:
        """The scheme in words."""
        if self.factor:
            return (
                f"{self.name}, one scale of 8 bits for {self.block} inputs of an output, and a "
                "factor for all"
            )
        shared = (
            "scale and minimum"
            if self.minimums
            else "scale and zero point"
            if self.zero_points
            else "scale"
        )
        kind = f"{self.scales} " if self.scales else ""
        return f"{self.name}, one {kind}{shared} for {self.block} inputs of an output"


FP8_WEIGHTS = Quantization(FP8, BLOCK)
"""What ``--quantize fp8`` makes."""
NVFP4 = Quantization(FP4, 16, scales=FP8)
"""What ``--quantize nvfp4`` makes: NVIDIA's format of that name."""
SEARCHED_INT4 = Quantization("uint4", BLOCK, minimums=True, scales="float16")
"""What ``--quantize int4`` makes of float32 weights. Its bytes are those of GGUF's Q4_1."""


@dataclass(frozen=True)
class Quantizations:
    """Quantization of the weights by where they are used. None: they keep the directory's element
    type.

    Attributes:
        layers: Of the base layers.
        head: Of the base model's LM head. A head that is tied to the embedding table then has a
            quantized copy of its own.
        draft: Of what only the draft's tokens depend on: the exit head, and the draft's copies of
            base layers and LM head. The draft has copies only if they take fewer bits than those of
            verify.
        tensors: Of single tensors, by their names in the checkpoint, instead of the above. They
            have the levels of the checkpoint's own file. Only here the embedding table can be
            quantized, with 8 bits, and a tied LM head is then the same tensor. The draft has no
            copies of them.
    """

    layers: Quantization | None = None
    head: Quantization | None = None
    draft: Quantization | None = None
    tensors: dict[str, Quantization] = field(default_factory=dict, hash=False, kw_only=True)

    @property
    def places(self) -> dict[str, Quantization | None]:
        """The quantizations that are not of single tensors, by the words for where they are
        used."""
        return {"layers": self.layers, "LM head": self.head, "draft": self.draft}

    @property
    def used(self) -> tuple[Quantization, ...]:
        """The quantizations that are not None."""
        return (*(one for one in self.places.values() if one is not None), *self.tensors.values())

    def of(self, name: str, shape: Shape) -> Quantization | None:
        """Quantization of a weight of a graph, by its name there and its shape in the checkpoint.

        The parts of a packed weight have the same, or they are not packed.
        """
        own = self._own(name)
        if own is not None or not is_linear(name):
            return own
        chosen = self.head if name == LM_HEAD else self.layers
        if name.startswith((DRAFT, EXIT_HEAD)):
            chosen = self.draft
        return None if chosen is None or shape[1] % chosen.block else chosen

    def _own(self, name: str) -> Quantization | None:
        """What a weight, or the first part of a packed one, has as a single tensor."""
        return self.tensors.get(parts_of(name)[0])

    def draft_name(self, name: str, shape: Shape, dtype: str) -> str:
        """Name in the draft graph of a weight that verify has as ``name``: the same, or that of the
        draft's copy."""
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
    """Names of the weights or biases that a packed one consists of; the name itself if it is not
    packed."""
    for packed, parts in PACKED.items():
        if packed in name:
            return tuple(name.replace(packed, part) for part in parts)
    return (name,)
