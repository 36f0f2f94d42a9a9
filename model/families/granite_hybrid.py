"""Granite 4 is Granite with state spaces (Mamba-2) instead of attention in most layers. Dense
models have attention in all layers. Some models have no rotary embedding. In mixtures, all tokens
also use a shared expert."""

from typing import Any

from eesd.common.geometry import DELTA, FULL, UNROTATED, Experts, Geometry
from eesd.model.experts import experts_of_all_layers, take_experts
from eesd.model.families.granite import take_factors
from eesd.model.families.granite_moe import granite_tensors
from eesd.model.family import (
    Family,
    Own,
    Sizes,
    Tensors,
    gate_and_up,
    renamed,
    take_layer_types,
)
from eesd.model.fields import Fields
from eesd.model.state_space import space_tensors, take_space

KINDS = {
    "mamba": DELTA,
    "linear_attention": DELTA,
    "attention": FULL,
    "full_attention": FULL,
}
"""Kinds of layers by their names in published configs, and in configs that transformers 5
writes."""
NAMES = {
    "shared_mlp.input_linear": "mlp.gate_up_proj",
    "shared_mlp.output_linear": "mlp.down_proj",
}


def _own(fields: Fields, sizes: Sizes) -> Own:
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    types = take_layer_types(fields, sizes.layers, KINDS, name)
    kinds = [KINDS[one] for one in types or ["mamba"] * sizes.layers]
    if fields.text("position_embedding_type") != "rope":
        kinds = [UNROTATED if one == FULL else one for one in kinds]
    rule = None
    if DELTA in kinds:
        rule = take_space(fields, fields.integer("mamba_expand", 2) * sizes.hidden, sizes.eps)
    fields.taken |= {name for name in fields.raw if name.startswith("mamba_")} | {"time_step_limit"}
    count = fields.integer("num_local_experts", 8, least=0)
    fields.taken |= {"num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"}
    shared = fields.integer("shared_intermediate_size", 1024)
    parts: dict[str, Any] = {"layer_kinds": tuple(kinds), "delta": rule}
    if count:
        count, used = take_experts(fields, 8, 2)
        size = fields.integer("intermediate_size")
        experts = Experts(count, used, size, normed=True, shared=shared)
        parts |= experts_of_all_layers(experts, shared)
    else:
        parts["intermediate_size"] = shared
    own = take_factors(fields, sizes)
    return own._replace(parts={**own.parts, **parts})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    own = space_tensors(tensors, geometry.delta, "mamba")
    if geometry.experts:
        return granite_tensors(own, geometry)
    return gate_and_up(renamed(own, NAMES), geometry)


GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    positions=2048,
    own=_own,
    tensors=_tensors,
)
