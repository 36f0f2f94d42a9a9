"""Sizes and options of a decoder and of its exit head.

``config.json`` is read into these objects and ``manifest.json`` stores them. The module needs no torch.
"""

from dataclasses import dataclass

from eesd.common.prior import CalibrationPrior


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies: ``linear`` (uses only ``factor``) or ``llama3`` (uses all four values)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Geometry:
    """Everything that the modules of a Llama-like decoder depend on.

    Covers Llama 2 and 3, CodeLlama, Mistral, Qwen2, Qwen2.5 and Qwen3.
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


@dataclass(frozen=True)
class ExitConfig:
    """Position and structure of an exit head.

    Attributes:
        layer: N, the number of base layers before the head.
        blocks: E, the number of decoder blocks in the head.
        own_lm_head: Whether the head has its own LM head. If not, it uses the base model's.
        base: Fingerprint of the base model.
        trained: False for an initialised head that was never trained.
        calibration: Calibration prior of this head. None: controllers use the default prior.
    """

    layer: int
    blocks: int = 1
    own_lm_head: bool = False
    base: str = ""
    trained: bool = False
    calibration: CalibrationPrior | None = None


def exit_caches(geometry: Geometry, exit_config: ExitConfig) -> range:
    """Indices of the exit blocks' caches, L .. L+E-1. The base layers have the caches 0 .. L-1."""
    return range(geometry.num_layers, geometry.num_layers + exit_config.blocks)


def draft_caches(geometry: Geometry, exit_config: ExitConfig) -> list[int]:
    """Indices of the caches that the draft uses: 0 .. N-1 and those of the exit blocks."""
    return [*range(exit_config.layer), *exit_caches(geometry, exit_config)]
