"""Mixtures of experts in checkpoints: fields that their families share, and the tensors of all
experts apart."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from eesd.common.architecture import ROUTER
from eesd.common.errors import EESDError
from eesd.common.geometry import Geometry
from eesd.model.arrays import to_float32
from eesd.model.family import Tensors, rows_of
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufTensor
from eesd.model.safetensors_file import CheckpointTensor

GGUF_NAMES = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")
}
"""Names of a block's modules by those of llama.cpp, which has all experts of a layer in one
tensor."""
_GGUF_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


class Counts(NamedTuple):
    """How many experts a layer has, and how many of them a token uses."""

    experts: int
    used: int


def take_experts(fields: Fields, count: int, used: int, least: int = 1) -> Counts:
    """The number of experts, at least ``least``, under either of its names, and how many of them a
    token uses.

    ``count`` and ``used`` are those of a config that does not say.
    """
    names = [name for name in ("num_local_experts", "num_experts") if name in fields.raw]
    counts = {fields.integer(name, least=least) for name in names} or {count}
    if len(counts) > 1:
        raise ValueError(
            "num_local_experts and num_experts differ, which are two names of one number"
        )
    fields.taken |= {"output_router_logits", "router_aux_loss_coef"}  # of a loss
    [found] = counts
    return Counts(
        found, fields.integer("num_experts_per_tok", used, **({"most": found} if found else {}))
    )


def gguf_counts(own: Fields, **more: str) -> dict[str, int]:
    """The fields for the numbers of experts in the metadata of a GGUF file, and of its keys
    ``more`` for theirs."""
    return {name: own.integer(key) for key, name in (_GGUF_COUNTS | more).items()}


def apart(tensors: Tensors, geometry: Geometry) -> Tensors:
    """The tensors with those of all experts of a layer apart, where they are one:
    ``mlp.experts.gate_up_proj`` [E, 2 size, in] and ``mlp.experts.down_proj`` [E, out, size], as
    transformers has them in memory, or those of gate and up alone. One of another shape stays
    whole, and its experts are missing."""
    experts = geometry.experts
    if experts is None:
        return tensors
    rows = {
        "gate_up_proj": (("gate_proj", "up_proj"), experts.size),
        "gate_proj": (("gate_proj",), experts.size),
    }
    rows |= {
        "up_proj": (("up_proj",), experts.size),
        "down_proj": (("down_proj",), geometry.hidden_size),
    }
    found = {}
    for name, tensor in tensors.items():
        before, _, module = name.removesuffix(".weight").rpartition(".mlp.experts.")
        parts, count = rows.get(module, ((), 0)) if before else ((), 0)
        if (
            not parts
            or len(tensor.shape) != 3
            or tensor.shape[:2] != (experts.count, len(parts) * count)
        ):
            found[name] = tensor
            continue
        shape = (prod(tensor.shape[:2]), tensor.shape[2])
        whole = replace(tensor, shape=shape) if isinstance(tensor, CheckpointTensor) else tensor
        if isinstance(tensor, GgufTensor):
            whole = tensor.matrices_below_each_other()
        for number in range(experts.count * len(parts)):
            expert, part = divmod(number, len(parts))
            own = rows_of(whole, number * count, (number + 1) * count)
            found[f"{before}.mlp.experts.{expert}.{parts[part]}.weight"] = own
    return found


def check_routers(path: Path, tensors: Tensors, geometry: Geometry) -> None:
    """Check that no two experts of a layer always have the same share: which of them a token uses,
    transformers says nowhere.

    Raises:
        EESDError: Two rows of a router are equal.
    """
    experts = geometry.experts
    for layer in range(geometry.num_layers):
        if (
            experts is None
            or experts.used == experts.count
            or geometry.of_layer(layer).experts is None
        ):
            continue
        name = f"model.layers.{layer}.{ROUTER}.weight"
        rows = to_float32(tensors[name].read()) + 0  # of two zeros, that without a sign
        if len({row.tobytes() for row in rows}) < experts.count:
            raise EESDError(
                f"{path}: two experts have equal rows in {name}, and which of them a token "
                "uses is not defined; "
                "it is not supported."
            )
