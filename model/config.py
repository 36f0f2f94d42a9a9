"""Read a Hugging Face ``config.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.geometry import Geometry, RopeScaling
from eesd.common.json_input import read_json_object

REMEDY = "give a complete Hugging Face model directory, or fetch the file again"

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a checkpoint.

    Attributes:
        geometry: Geometry of the decoder.
        max_positions: Number of positions that the model supports.
        dtype: Element type of the checkpoint, such as ``bfloat16``.
        bos_token_id: Token that begins a text; None if the model has none.
        eos_token_ids: Tokens that end a text.
    """

    geometry: Geometry
    max_positions: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def load_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and the EOS ids of ``generation_config.json`` of a model directory.

    Raises:
        EESDError: A file is missing or damaged, or the decoder does not implement the architecture or one of its options.
    """
    raw = read_json_object(model_dir / "config.json", REMEDY)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise EESDError(f"The architecture {architecture} is not supported; supported are {', '.join(SUPPORTED)}.")
    try:
        return _from_raw(raw, architecture, _eos_ids(model_dir, raw))
    except KeyError as error:
        raise EESDError(f"{model_dir / 'config.json'} has no {error.args[0]!r}; the file is incomplete.") from None
    except (TypeError, ValueError) as error:
        raise EESDError(f"{model_dir / 'config.json'} has a value that cannot be used: {error}.") from None


def _from_raw(raw: dict[str, Any], architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise EESDError(f"The activation {raw['hidden_act']!r} is not supported; supported is 'silu'.")
    heads = int(raw["num_attention_heads"])
    theta, scaling = _rope(raw)
    positions = int(raw.get("max_position_embeddings", 2048))
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", architecture == "MistralForCausalLM"):
        positions = min(positions, int(window))  # up to the window's length, sliding attention equals full attention
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(raw.get("attention_bias", False))
    hidden = int(raw["hidden_size"])
    geometry = Geometry(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_theta=theta,
        rope_scaling=scaling,
    )
    return ModelConfig(
        geometry=geometry,
        max_positions=positions,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=eos,
    )


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from ``rope_parameters`` (transformers 5), or from ``rope_theta`` and ``rope_scaling`` (4)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if float(parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise EESDError("Partial rotary embeddings are not supported; the whole head must be rotated.")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(parameters["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise EESDError(f"The rope scaling {kind!r} is not supported; supported are default, linear, llama3.")


def _eos_ids(model_dir: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    eos = read_json_object(path, REMEDY).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)
