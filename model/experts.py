"""Read mixtures of experts in checkpoints. This module reads the fields that several families
share, and splits joint tensors."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eesd.common.architecture import CHOICE_BIAS, ROUTER, SHARED
from eesd.common.errors import EESDError
from eesd.common.geometry import Experts, Geometry
from eesd.model.arrays import to_float32
from eesd.model.family import Tensors, below_each_other, rows_of
from eesd.model.fields import Fields

GGUF_NAMES = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down", "gate_up")
}
"""The names of modules within a block, by llama.cpp's names for them. llama.cpp stores all experts
of a layer in one tensor."""
GGUF_SCORED = GGUF_NAMES | {"exp_probs_b.bias": f"{CHOICE_BIAS}.weight"}
GGUF_SCORED |= {f"ffn_{part}_shexp": f"{SHARED}.{part}_proj" for part in ("gate", "up", "down")}
"""The same for experts that are chosen as in DeepSeek-V3."""
SOFTMAX = 1
SIGMOID = 2
"""llama.cpp's numbers for the scores of experts (``expert_gating_func``)."""
_GGUF_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


class Counts(NamedTuple):
    """The number of experts in a layer and the number of experts that a token uses."""

    experts: int
    used: int


def take_experts(
    fields: Fields,
    count: Any,
    used: Any,
    least: int = 1,
    names: tuple[str, str] = ("num_local_experts", "num_experts"),
) -> Counts:
    """Return the number of experts (at least ``least``) and the number of experts that a token
    uses. The first number can have two field names.

    ``count`` and ``used`` are the defaults, or ``...`` if the field is required.
    """
    found = [name for name in names if name in fields.raw] or names[:1]
    counts = {fields.integer(name, count, least=least) for name in found}
    if len(counts) > 1:
        raise ValueError(f"{names[0]} and {names[1]} differ, which are two names of one number")
    fields.taken |= {"output_router_logits", "router_aux_loss_coef"}  # for a training loss
    [experts] = counts
    most = experts or 2**63 - 1
    return Counts(experts, fields.integer("num_experts_per_tok", used, most=most))


def scored_experts(
    fields: Fields,
    layers: int,
    defaults: Mapping[str, Any],
    dense: Sequence[int] | None = None,
) -> dict[str, Experts | None]:
    """Return the part of the geometry for experts that are chosen as in DeepSeek-V3. Their scores
    are sigmoids plus biases, and the choice may be limited to groups.

    Args:
        fields: The fields of the config.
        layers: Number of layers.
        defaults: Defaults of fields. A field without a default is required. Fields with names of
            EXAONE are read under the names that are used here.
        dense: Layers without experts, or None to read ``first_k_dense_replace``.
    """

    def take(name: str, least: int = 1) -> Any:
        return fields.integer(name, defaults.get(name, ...), least=least)

    names = (
        "num_experts" if "num_experts" in defaults else "n_routed_experts",
        "num_local_experts",
    )
    shared = "num_shared_experts" if "num_shared_experts" in defaults else "n_shared_experts"
    most = defaults.get(names[0], ...)
    most_used = defaults.get("num_experts_per_tok", ...)
    count, used = take_experts(fields, most, most_used, names=names)
    size = take("moe_intermediate_size")
    groups = fields.integer("n_group", defaults.get("n_group", 1))
    if dense is None:
        dense = range(min(layers, take("first_k_dense_replace", least=0)))
    experts = Experts(
        count,
        used,
        size,
        normed=fields.flag("norm_topk_prob", defaults["norm_topk_prob"]),
        dense_layers=tuple(dense),
        shared=size * take(shared, least=0),
        scores="sigmoid",
        choice_bias=True,
        groups=groups,
        used_groups=fields.integer("topk_group", defaults.get("topk_group", 1), most=groups),
        group_best=2 if groups > 1 else 1,
        norm_eps=1e-20,
        scale=fields.number("routed_scaling_factor", defaults["routed_scaling_factor"]),
    )
    return {"experts": experts if len(dense) < layers else None}


def experts_of_all_layers(experts: Experts, shared: int = 0) -> dict[str, Any]:
    """Return the parts of the geometry for a model with experts in all layers. Such a model has no
    other MLPs, so ``intermediate_size`` is the size of the MLPs of an exit head's blocks. It is the
    total size of the experts that a token uses, plus ``shared``."""
    return {"experts": experts, "intermediate_size": experts.used * experts.size + shared}


def scored_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors of these experts with the decoder's names."""
    bias = r"\.mlp\.(gate\.)?e_score_correction_bias$"
    shared = (".mlp.shared_experts.", f".{SHARED}.")
    found = {
        re.sub(bias, f".{CHOICE_BIAS}.weight", name.replace(*shared)): tensor
        for name, tensor in tensors.items()
    }
    return apart(found, geometry)


def gguf_counts(own: Fields, **more: str) -> dict[str, int]:
    """Return config fields with the numbers of experts from a GGUF file's metadata. ``more`` maps
    further metadata keys to names of fields."""
    return {name: own.integer(key) for key, name in (_GGUF_COUNTS | more).items()}


def gguf_scored(
    own: Fields, experts: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """Return config fields of experts that are chosen as in DeepSeek-V3 from a GGUF file's
    metadata. ``experts`` and ``shared`` are the fields with the numbers of experts."""
    counts = gguf_counts(own, expert_feed_forward_length="moe_intermediate_size")
    return counts | {
        experts: counts.pop("num_experts"),
        shared: own.integer("expert_shared_count", 0, least=0),
        "first_k_dense_replace": own.integer("leading_dense_block_count", 0, least=0),
        "n_group": own.integer("expert_group_count", 1),
        "topk_group": own.integer("expert_group_used_count", 1),
        "norm_topk_prob": own.flag("expert_weights_norm"),
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0),
    }


def check_sigmoid(scores: int) -> None:
    """Raise ValueError unless a GGUF file scores experts with the sigmoid function."""
    if scores != SIGMOID:
        raise ValueError("expert_gating_func must be 2, which stands for sigmoids")


def gguf_sigmoid(own: Fields, experts: str = "n_routed_experts", **more: str) -> dict[str, Any]:
    """Return the fields of :func:`gguf_scored` if the scores are sigmoids."""
    check_sigmoid(own.integer("expert_gating_func", SIGMOID))
    return gguf_scored(own, experts, **more)


def apart(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Split tensors that hold all experts of a layer. They are ``mlp.experts.gate_up_proj``
    [E, 2 size, in] and ``mlp.experts.down_proj`` [E, out, size], as transformers has them in
    memory. Gate and up can also be separate tensors. A tensor of another shape is not split, and
    its experts are reported missing."""
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
        parts, count = rows.get(before and module, ((), 0))
        if (
            not parts
            or len(tensor.shape) != 3
            or tensor.shape[:2] != (experts.count, len(parts) * count)
        ):
            found[name] = tensor
            continue
        whole = below_each_other(tensor)
        for number in range(experts.count * len(parts)):
            expert, part = divmod(number, len(parts))
            own = rows_of(whole, number * count, (number + 1) * count)
            found[f"{before}.mlp.experts.{expert}.{parts[part]}.weight"] = own
    return found


def check_routers(path: Path, tensors: Tensors, geometry: Geometry) -> None:
    """Check that no two experts of a layer always have equal shares. transformers does not define
    which of the two a token would use.

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
        rows = to_float32(tensors[name].read())
        if experts.choice_bias:
            bias = to_float32(tensors[f"model.layers.{layer}.{CHOICE_BIAS}.weight"].read())
            rows = np.concatenate((rows, bias[:, None]), 1)
        rows = rows + 0  # makes -0 equal 0
        if len({row.tobytes() for row in rows}) < experts.count:
            raise EESDError(
                f"{path}: two experts have equal rows in {name}, and which of them a token "
                "uses is not defined; "
                "it is not supported."
            )
