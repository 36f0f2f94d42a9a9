"""The shape of a decoder and of its exit head: the same two objects from config.json to the manifest and back.

Needs no torch, so that the runtime and ``eesd-inspect`` can use it.
"""

from dataclasses import dataclass

from eesd.common.prior import CalibrationPrior


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: ``linear`` (uses ``factor`` alone) or ``llama3`` (uses all four values)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Geometry:
    """A Llama-shaped decoder (Llama 2/3, CodeLlama, Mistral, Qwen2, Qwen2.5, Qwen3): all that its modules depend on."""

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

    @property
    def parameters(self) -> int:
        """Number of weights of the base model, norms and biases not counted."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings


@dataclass(frozen=True)
class ExitConfig:
    """Where the exit head leaves the model, and what it consists of.

    Attributes:
        layer: N, the number of base layers before the head.
        blocks: E, the number of decoder blocks in the head.
        own_lm_head: Whether the head has its own LM head. If not, it uses the base model's.
        base: Fingerprint of the base model.
        trained: False for a head that was only initialised.
        calibration: Prior of the controllers' calibration for this head. None: the default prior.
    """

    layer: int
    blocks: int = 1
    own_lm_head: bool = False
    base: str = ""
    trained: bool = False
    calibration: CalibrationPrior | None = None
