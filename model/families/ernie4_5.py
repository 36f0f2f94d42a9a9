"""The rotary embedding of ERNIE 4.5 pairs neighbouring values of a head. One field switches all
biases on or off. In mixtures, biases take part in the choice of experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.common.architecture import CHOICE_BIAS
from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import GGUF_SCORED, apart, scored_tensors, take_experts
from eesd.model.family import Family, Gguf, Own, Sizes, Tensors
from eesd.model.fields import Fields
from eesd.model.safetensors_file import CheckpointTensor


def _own(fields: Fields, _: Sizes) -> Own:
    return Own(dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.flag("use_bias")))


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    positions=131072,
    kv_heads=2,
    head_dim=128,
    theta=500000.0,
    eps=1e-5,
    tied=True,
    interleaved=True,
    own=_own,
    gguf=Gguf("ernie4_5", biases={"use_bias": "attn_q"}, interleaved=True),
)


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    if fields.flag("use_bias"):
        raise ValueError("use_bias is not supported in a mixture; it must be false")
    if not fields.number("moe_norm_min", 1e-12) <= 1e-9:
        raise ValueError("moe_norm_min must be at most 1e-9, as in all published models")
    # Fields of published configs that have no effect here. Vision experts belong to other models
    # (ernie4_5_vl_moe).
    fields.taken |= {"moe_capacity", "moe_gate", "moe_gate_act", "moe_use_aux_free"}
    names = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    given = {old: fields.take(new) for old, new in names.items() if new in fields.raw}
    count, used = take_experts(Fields(given), 64, 6)
    fields.taken |= {"output_router_logits", "router_aux_loss_coef"}
    size = fields.integer("moe_intermediate_size", 1536)
    shared = fields.integer("moe_num_shared_experts", 2, least=0)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    step = fields.integer("moe_layer_interval", 1)
    stop = sizes.layers if last == -1 else last + 1
    dense = [
        layer for layer in range(sizes.layers) if not first <= layer < stop or (layer + 1) % step
    ]
    experts = Experts(count, used, size, True, tuple(dense), shared=shared * size, choice_bias=True)
    return Own({"experts": experts if len(dense) < sizes.layers else None})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".moe_statics." in name and isinstance(tensor, CheckpointTensor):
            name = name.replace(".gate.moe_statics.", ".gate.").replace(".moe_statics.", ".gate.")
            tensor = replace(tensor, shape=tensor.shape[-1:])  # stored as [1, experts]
        found[name] = tensor
    return scored_tensors(found, geometry)


def _of_gguf_mixed(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. llama.cpp has the size of all shared experts together."""
    names = {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
    found = {name: own.integer(key) for key, name in names.items()}
    own.taken.add("expert_shared_count")
    shared = own.integer("expert_shared_feed_forward_length", 0, least=0)
    return found | {
        "moe_num_shared_experts": shared // found["moe_intermediate_size"],
        "moe_layer_start_index": own.integer("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": own.integer("interleave_moe_layer_step", 1),
    }


def _of_gguf_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the decoder's tensors. Biases of choices may have a dimension of 1 more."""
    found = apart(tensors, geometry)
    for name, tensor in found.items():
        if isinstance(tensor, CheckpointTensor) and f".{CHOICE_BIAS}." in name:
            found[name] = replace(tensor, shape=tensor.shape[-1:])
    return found


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    kv_heads=4,
    head_dim=None,
    own=_own_mixed,
    tensors=_tensors,
    gguf=Gguf(
        "ernie4_5-moe",
        GGUF_SCORED,
        fields=_of_gguf_mixed,
        tensors=_of_gguf_tensors,
        interleaved=True,
    ),
)
