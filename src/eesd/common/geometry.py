"""Sizes and options of a decoder and of its exit head.

``config.json`` is read into these objects and ``manifest.json`` stores them. The module needs no torch.
"""

from dataclasses import dataclass, replace
from math import inf

from eesd.common.errors import EESDError
from eesd.common.prior import CalibrationPrior


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies, with a rule that does not depend on the length of the text.

    Attributes:
        kind: ``linear``, ``llama3`` or ``yarn``.
        factor: How much longer texts become.
        original_max_position: Positions of the model before the scaling (llama3, yarn).
        low_freq_factor: Waves that turn less often than this within the original positions are scaled (llama3).
        high_freq_factor: Waves that turn more often are not (llama3).
        beta_fast: Dimensions whose waves turn more often than this are not scaled (yarn).
        beta_slow: Dimensions whose waves turn less often are (yarn).
        attention_factor: Factor of cos and sin (yarn).
        truncate: Whether the bounds of the dimensions between are rounded to integers (yarn).
    """

    kind: str
    factor: float
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The supported architectures by their ``model_type``."""
MOST_LAYERS, LARGEST_SIZE = 4096, 1 << 24
"""Bounds for what a file may say about a model, so that a damaged one cannot take all memory."""


@dataclass(frozen=True)
class Geometry:
    """Everything that the modules of a Llama-like decoder depend on.

    Covers Llama 2 and 3, CodeLlama, Mistral, Qwen2, Qwen2.5 and Qwen3.

    Raises:
        ValueError: A value is out of range, or does not fit the others.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: RopeScaling | None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _check_size(name, getattr(self, name), MOST_LAYERS if name == "num_layers" else LARGEST_SIZE)
        _check_size("vocab_size", self.vocab_size, LARGEST_SIZE, least=2)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} key-value heads do not divide {self.num_heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, and must be even for rotary embeddings")
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}, and must be at least 0 and below 1")
        if not 0 < self.rope_theta < inf:
            raise ValueError(f"rope_theta is {self.rope_theta}, and must be above 0")

    def on_rank(self, ranks: int) -> "Geometry":
        """What each of so many ranks has of a split model. Raises :class:`EESDError` if they cannot have equal parts."""
        for what, size in (("key-value heads", self.num_kv_heads), ("columns of the MLP", self.intermediate_size)):
            if size % ranks:
                raise EESDError(f"{ranks} ranks do not divide the model's {size} {what}; give another number.")
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
        )


def _check_size(name: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:20]}, and must be between {least} and {most}")


@dataclass(frozen=True)
class Eagle:
    """Structure of an EAGLE-3 head (arXiv 2503.01840), which reads the model's states and then its own.

    Attributes:
        layers: The layers whose hidden states verify fuses to what the head reads, ascending.
        block: Sizes of its block, whose attention reads an embedding and a state side by side. Caches have one shape, so hidden
            size, KV heads and their size are the model's.
        normed_residual: Whether the block adds to the norm of the state, and not to the state itself.
    """

    layers: tuple[int, ...]
    block: Geometry
    normed_residual: bool = False


@dataclass(frozen=True)
class ExitConfig:
    """Position and structure of a head that drafts: an exit head, or one of EAGLE-3.

    Attributes:
        layer: N, the number of base layers before the head.
        blocks: E, the number of decoder blocks in the head. 0: norm and LM head follow layer N, as LayerSkip trains models for.
        own_lm_head: Whether the head has its own LM head. If not, it uses the base model's. In an engine directory a draft
            vocabulary always has an LM head of its own: the rows of its tokens.
        base: Fingerprint of the base model.
        trained: False for an initialised head that was never trained.
        calibration: Calibration prior of this head. None: controllers use the default prior.
        draft_vocab: Vd, the number of tokens that the head can predict. 0: the whole vocabulary.
        deep: Layers above N, ascending, whose hidden states verify puts into the deep cache, where the draft reads them. Empty:
            there is none.
        eagle: What an EAGLE-3 head is. It has one block, its own LM head, and stands behind the embeddings: N is 0. None for an
            exit head.
    """

    layer: int
    blocks: int = 1
    own_lm_head: bool = False
    base: str = ""
    trained: bool = False
    calibration: CalibrationPrior | None = None
    draft_vocab: int = 0
    deep: tuple[int, ...] = ()
    eagle: Eagle | None = None

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers behind which verify writes states for the head, ascending."""
        return self.eagle.layers if self.eagle else self.deep


def eagle_fault(geometry: Geometry, exit_config: ExitConfig) -> str | None:
    """Why a model cannot have this EAGLE-3 head; None: it can."""
    eagle = exit_config.eagle
    if eagle is None:
        return None
    for name in ("hidden_size", "num_kv_heads", "head_dim", "vocab_size"):
        own, models = getattr(eagle.block, name), getattr(geometry, name)
        if own != models:
            return f"its {name} is {own}, and the model's is {models}"
    layers = eagle.layers
    if not layers or list(layers) != sorted(set(layers)) or not all(1 <= layer <= geometry.num_layers for layer in layers):
        return (
            f"it reads states after the layers {', '.join(map(str, layers))}; they must ascend, from 1 to {geometry.num_layers}"
        )
    if (exit_config.layer, exit_config.blocks, exit_config.own_lm_head, exit_config.deep) != (0, 1, True, ()):
        return "it must have one block and its own LM head"
    return None


def state_caches(geometry: Geometry, exit_config: ExitConfig) -> int:
    """Caches that hold states, to which nothing attends: the deep cache, or as many as an EAGLE-3 head's state takes."""
    width = 2 * geometry.num_kv_heads * geometry.head_dim
    return -(-geometry.hidden_size // width) if exit_config.eagle else int(bool(exit_config.deep))


def deep_fault(num_layers: int, exit_config: ExitConfig) -> str | None:
    """Why a model with so many layers cannot have a head with these deep layers; None: it can."""
    deep = exit_config.deep
    if list(deep) != sorted(set(deep)) or not all(exit_config.layer < layer <= num_layers for layer in deep):
        return f"deep layers must ascend, from {exit_config.layer + 1} to at most {num_layers}"
    if deep and not exit_config.blocks:
        return "a head without blocks has no attention behind which they could be added"
    return None


def draft_columns(geometry: Geometry, exit_config: ExitConfig) -> int:
    """Columns of the draft's logits: the size of the draft vocabulary, or V."""
    return exit_config.draft_vocab or geometry.vocab_size


def exit_caches(geometry: Geometry, exit_config: ExitConfig) -> range:
    """Indices of the exit head's caches: those of its blocks, L .. L+E-1, and those of states from L+E on. The base layers have
    the caches 0 .. L-1."""
    return range(geometry.num_layers, geometry.num_layers + exit_config.blocks + state_caches(geometry, exit_config))


def draft_caches(geometry: Geometry, exit_config: ExitConfig) -> list[int]:
    """Indices of the caches that the draft uses: 0 .. N-1 and those of the exit head."""
    return [*range(exit_config.layer), *exit_caches(geometry, exit_config)]
