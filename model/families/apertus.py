"""Apertus has norms of queries and keys, and an MLP without a gate. The activation of the MLP is
xielu, which has two parameters in each block."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from eesd.common.architecture import XIELU, XIELU_LIMIT, XIELU_SLOPE
from eesd.common.errors import EESDError
from eesd.common.geometry import Geometry
from eesd.model.arrays import Array, to_float32
from eesd.model.family import (
    ChangedTensor,
    Family,
    Gguf,
    Own,
    Sizes,
    StoredTensor,
    Tensors,
    as_stored,
    attention_biases,
    renamed,
    rope_or,
)
from eesd.model.fields import Fields

THETA = 12000000.0
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Default of ``rope_parameters``."""
NAMES = {
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "post_attention_layernorm",
}
NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
"""Names of the numbers that a file stores for xielu."""
GGUF_NUMBERS = "xielu"
"""Field for xielu's numbers in the metadata of a GGUF file."""


def _rope_fields(fields: Fields) -> Fields:
    return rope_or(fields, ROPE)


def _own(fields: Fields, sizes: Sizes) -> Own:
    for name, only in {"qk_norm": True, "post_norm": False, "mlp_bias": False}.items():
        if fields.flag(name, only) is not only:
            raise ValueError(f"{name} must be {str(only).lower()}, as in all published models")
    fields.taken.add("hidden_dropout")  # only in training
    parts = attention_biases(fields) | {"qk_norm": True, "gated": False}
    return Own(parts, values=_stored_in_metadata(fields, sizes.layers))


def _stored_in_metadata(fields: Fields, layers: int) -> dict[str, Array]:
    """Return xielu's factors in a GGUF file. The metadata has the numbers of each layer."""
    given = fields.take(GGUF_NUMBERS, None)
    if given is None:
        return {}
    for name, row in zip(NUMBERS, given, strict=True):
        numeric = isinstance(row, list) and all(type(one) in (int, float) for one in row)
        if not numeric or len(row) != layers or not np.isfinite(row).all():
            raise ValueError(f"xielu.{name} must have a number for each of the {layers} layers")
    numbers = np.array(given, np.float32)
    for name, row, only in zip(NUMBERS[2:], numbers[2:], (XIELU_SLOPE, XIELU_LIMIT), strict=True):
        if (np.abs(row / only - 1) > 0.05).any():
            raise ValueError(f"xielu.{name} must be {only}, as in published models")
    factors = np.logaddexp(0, numbers[:2].T) + np.array([0, XIELU_SLOPE])
    names = (f"model.layers.{layer}.{XIELU}.weight" for layer in range(layers))
    return dict(zip(names, factors.astype(np.float32), strict=True))


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    # Without a scaling in the file, frequencies are not scaled.
    rope = raw["rope_scaling"] or {"rope_type": "default"}
    numbers = [own.take(f"xielu.{number}") for number in NUMBERS]
    return {GGUF_NUMBERS: numbers, "rope_scaling": rope}


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    """Join the tensors of a block's xielu factors."""
    found = renamed(tensors, NAMES)
    for name, above in tensors.items():
        prefix = name.removesuffix(".alpha_p")
        numbers = [found.get(f"{prefix}.{number}") for number in NUMBERS]
        if not prefix.endswith(XIELU) or prefix == name or None in numbers:
            continue
        stored_numbers = [one for one in numbers if one is not None]
        below = stored_numbers[1]
        constants = stored_numbers[2:]
        for stored, only in zip(constants, (XIELU_SLOPE, XIELU_LIMIT), strict=True):
            if abs(float(to_float32(stored.read()).reshape(-1)[0]) / only - 1) > 0.05:
                raise EESDError(f"The tensor {stored.name} must be {only}, as in published models.")
        for number in NUMBERS:
            del found[f"{prefix}.{number}"]
        found[f"{prefix}.weight"] = ChangedTensor(above, partial(_factors, below), (2,))
    return found


def _factors(below: StoredTensor, above: Array) -> Array:
    """Return the factors above and below 0. The stored numbers are roughly the logarithms of the
    factors."""
    stored = np.concatenate([above.reshape(-1), to_float32(below.read()).reshape(-1)])
    factors: Array = np.logaddexp(0, stored) + np.array([0, XIELU_SLOPE])
    return factors.astype(np.float32)


APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    positions=65536,
    theta=THETA,
    eps=1e-5,
    activation=("hidden_act", "xielu"),
    activation_names={"xielu": "xielu", "relu2": "relu2"},
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
    gguf=Gguf("apertus", fields=_of_gguf, tensors=as_stored),
)
