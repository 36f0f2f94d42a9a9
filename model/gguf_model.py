"""Present the model in a GGUF file as a Hugging Face checkpoint, with the fields of ``config.json``
and tensors by name.

Every key of the architecture is applied, has no effect, or is refused by name. If llama.cpp
uses a value that transformers ignores, such as the scaling of rotary frequencies, this module
follows llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.geometry import RopeScaling
from eesd.common.quantization import LM_HEAD
from eesd.common.weights import EMBEDDINGS, FINAL_NORM
from eesd.model.families import FAMILIES
from eesd.model.family import Family, Gguf, GgufFields
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufFile, GgufTensor
from eesd.model.gguf_special import end_tokens
from eesd.model.rotary import frequencies, llama3_frequencies
from eesd.model.safetensors_file import DTYPES, CheckpointTensor

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_NO_EFFECT = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned")
"""Keys that do not change the results of a decoder. The embedding table determines the size of the
vocabulary."""
_DRAFTER = "nextn_predict_layers"
"""Key for the number of last blocks that belong to the model's own drafter."""
_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency."""
_ENDLESS = 1e30
"""Divisor of frequencies of values that are not rotated."""
_LLAMA3_POSITIONS = 8192
"""The original number of positions of all published models with llama3 scaling. The other values of
the scaling follow from the divisors."""
_TENSORS = {"token_embd": EMBEDDINGS, "output_norm": FINAL_NORM, "output": LM_HEAD}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_fields(file: GgufFile) -> dict[str, Any]:
    """Return the fields of ``config.json`` for a GGUF file.

    Raises:
        EESDError: The architecture or one of its options is not supported, or a key is missing.
    """
    try:
        return _fields(file)
    except KeyError as error:
        raise EESDError(
            f"{file.path} has no {error.args[0]!r}; the file is incomplete, fetch it again."
        ) from None
    except ValueError as error:
        raise EESDError(f"{file.path} cannot be used: {error}.") from None


def _fields(file: GgufFile) -> dict[str, Any]:
    general = Fields(file.metadata)
    kind = general.text("general.type")
    if kind not in (None, "model"):
        raise ValueError(f"it is not a model but of the type {shown(kind)}")
    family, gguf = _family(general)
    prefix = f"{gguf.architecture}."
    own = GgufFields(
        {
            name.removeprefix(prefix): value
            for name, value in file.metadata.items()
            if name.startswith((prefix, "xielu."))
        },
        prefix,
        file.tensors,
    )
    raw: dict[str, Any] = {
        name: own.integer(key)
        for key, name in _SIZES.items()
        if key not in gguf.optional or type(own.raw.get(key)) is int
    }
    raw["num_hidden_layers"] -= own.integer(_DRAFTER, 0, least=0)
    raw |= {
        "model_type": family.model_type,
        family.eps_name: own.number(gguf.eps),
    }
    raw["num_key_value_heads"] = _kv_heads(own, raw, gguf.heads_by_layer)
    partial = family.partial_rotary is not None
    if not gguf.latent:
        raw |= _head_sizes(own, raw["hidden_size"], raw["num_attention_heads"], partial)
    raw["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["rope_theta"] = own.number("rope.freq_base", 10000.0)
    raw["rope_scaling"] = _rope_scaling(own, file, raw)
    raw |= {name: f"blk.0.{tensor}.bias" in file.tensors for name, tensor in gguf.biases.items()}
    raw |= gguf.fields(own, raw)
    if not own.flag("attention.causal", True):
        raise ValueError("its attention is not causal, which is not supported")
    other = next((name for name in own.left if own.raw[name] and name not in _NO_EFFECT), None)
    if other is not None:
        name = " ".join(f"{prefix}{other}".split())  # a damaged file may have any characters
        raise ValueError(f"it has {name} {shown(own.raw[other])}, which is not supported")
    return raw | _special_tokens(general)


def _family(general: Fields) -> tuple[Family, Gguf]:
    """Return the family that ``general.architecture`` names. If several families share the name, it
    is the family whose key is in the file, or else the family without a key."""
    name = general.take("general.architecture")
    known = [(family, family.gguf) for family in FAMILIES.values() if family.gguf]
    found = [(family, one) for family, one in known if one.architecture == name]
    found = [
        (family, one)
        for family, one in found
        if not one.key or general.raw.get(f"{name}.{one.key}")
    ]
    if not found:
        names = ", ".join(dict.fromkeys(one.architecture for _, one in known))
        raise ValueError(f"the architecture {shown(name)} is not supported; supported are {names}")
    return max(found, key=lambda one: one[1].key)


def _kv_heads(own: Fields, raw: Mapping[str, Any], by_layer: int) -> int:
    """Return the number of KV heads. A file may list the number for each layer, with 0 for layers
    without attention. Such a list has at most ``by_layer`` different numbers above 0, the largest
    of which is returned."""
    name = "attention.head_count_kv"
    given = own.take(name, raw["num_attention_heads"])
    if by_layer and isinstance(given, list):
        found = {*given} - {0}
        numbers = [count for count in found if type(count) is int]
        if len(given) != raw["num_hidden_layers"] or not 1 <= len(found) <= by_layer or not numbers:
            raise ValueError(
                f"{name} is {shown(given)}, and must have a number for each layer, with at most "
                f"{by_layer} different numbers above 0"
            )
        given = max(numbers)
    heads: int = Fields({name: given}).integer(name)
    return heads


def _special_tokens(general: Fields) -> dict[str, Any]:
    bos = general.integer("tokenizer.ggml.bos_token_id", None, optional=True, least=0)
    return {"bos_token_id": bos, "eos_token_id": end_tokens(general)}


def _head_sizes(own: Fields, hidden: int, heads: int, partial: bool) -> dict[str, Any]:
    """Return ``head_dim``. If only a part of a head can be rotated, also return its share."""
    given, of_values, rotated = (
        own.integer(name, None, optional=True)
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    if given is None and rotated is None and hidden % heads:
        raise ValueError(
            f"{heads} heads do not divide {hidden} values, and there is no attention.key_length"
        )
    size: int = given or (not partial and rotated) or hidden // heads
    if of_values not in (None, size):
        raise ValueError(
            f"its heads have {size} values in keys and {of_values} in values, which is not "
            "supported"
        )
    if rotated not in (None, size) and not partial:
        raise ValueError(
            f"only {rotated} of a head's {size} values are rotated, which is not supported"
        )
    if rotated and partial:
        return {"head_dim": size, "partial_rotary_factor": rotated / size}
    return {"head_dim": size}


def _rope_scaling(own: Fields, file: GgufFile, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``rope_scaling``. llama.cpp treats a factor without a type as linear scaling."""
    kind = own.text("rope.scaling.type") or "linear"
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 1.0)) or 1.0
    factors = file.tensors.get(_ROPE_FACTORS)
    original = own.integer("rope.scaling.original_context_length", None, optional=True)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"the rope scaling {shown(kind)} is not supported; supported are linear, yarn, "
            "and that of Llama 3"
        )
    if factors is not None:
        if kind == "yarn" or (kind == "linear" and factor != 1):
            raise ValueError(
                f"it has both {_ROPE_FACTORS} and rope.scaling, which is not supported"
            )
        return _by_divisors(factors.read(), raw["rope_theta"], raw.get("head_dim", 0))
    if kind == "yarn":
        betas = {
            f"beta_{end}": own.number(f"rope.scaling.yarn_beta_{end}", None, optional=True)
            for end in ("fast", "slow")
        }
        original = original or raw["max_position_embeddings"]
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        } | betas
    return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def _by_divisors(
    divisors: NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """Return the scaling with these divisors of rotary frequencies. It is the llama3 scaling, or
    only the first values of a head are rotated."""
    if divisors.shape != (head_dim // 2,):
        raise ValueError(
            f"{_ROPE_FACTORS} has {list(divisors.shape)} values for heads of {head_dim}"
        )
    scaling = RopeScaling("llama3", float(divisors.max()), _LLAMA3_POSITIONS)
    if (divisors == 1).all():
        return None
    rotated = int((divisors == 1).sum())
    if (divisors[:rotated] == 1).all() and (divisors[rotated:] >= _ENDLESS).all():
        share = 2 * rotated / head_dim
        return {"rope_type": "proportional", "partial_rotary_factor": share}
    with np.errstate(all="ignore"):  # a divisor can be 0
        plain = frequencies(theta, head_dim)
        fits = np.allclose(plain / divisors, llama3_frequencies(plain, scaling), rtol=1e-4, atol=0)
    if not fits:
        raise ValueError(
            f"{_ROPE_FACTORS} is not the scaling of Llama 3, and other divisors are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def model_tensors(
    file: GgufFile, config: Mapping[str, Any]
) -> dict[str, CheckpointTensor | GgufTensor]:
    """Return the tensors of a GGUF file by their names in a Hugging Face checkpoint. A tensor
    without such a name keeps its name in the file.

    Args:
        file: The file.
        config: The result of :func:`config_fields`.
    """
    gguf = FAMILIES[config["model_type"]].gguf
    assert gguf is not None
    block = _BLOCK | dict(gguf.names)
    drafter = drafter_blocks(file, config)
    return {
        _hugging_face_name(name, block): tensor if tensor.stored in DTYPES else GgufTensor(tensor)
        for name, tensor in file.tensors.items()
        if name != _ROPE_FACTORS and not name.startswith(drafter)
    }


def drafter_blocks(file: GgufFile, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the blocks that belong to the model's own drafter."""
    blocks = file.metadata[f"{file.metadata['general.architecture']}.block_count"]
    return tuple(f"blk.{layer}." for layer in range(config["num_hidden_layers"], blocks))


def _hugging_face_name(name: str, block: Mapping[str, str]) -> str:
    module, _, part = name.rpartition(".")
    if module in _TENSORS and (part == "weight" or module == "output_norm"):
        return _TENSORS[module].replace("weight", part)
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name, re.ASCII)
    if not found:
        return block.get(name, name)
    prefix = f"model.layers.{int(found[1])}."
    module, _, part = found[2].rpartition(".")
    if found[2] in block:
        return prefix + block[found[2]]
    return f"{prefix}{block[module]}.{part}" if module in block else name
