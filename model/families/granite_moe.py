"""Granite 3 with experts in each layer. Some models also have an expert that every token uses."""

from dataclasses import replace

from eesd.common.architecture import ROUTER, SHARED
from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import apart, experts_of_all_layers, take_experts
from eesd.model.families.granite import take_factors
from eesd.model.family import Family, Own, Sizes, Tensors, renamed, split
from eesd.model.fields import Fields

NAMES = {
    "block_sparse_moe.router.layer": ROUTER,
    "block_sparse_moe.router": ROUTER,
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj",
    "shared_mlp.input_linear": f"{SHARED}.gate_up_proj",
    "shared_mlp.output_linear": f"{SHARED}.down_proj",
}


def _own(fields: Fields, sizes: Sizes) -> Own:
    return _mixed(fields, sizes, shared=0)


def _own_of_shared(fields: Fields, sizes: Sizes) -> Own:
    return _mixed(fields, sizes, fields.integer("shared_intermediate_size", 0, least=0))


def _mixed(fields: Fields, sizes: Sizes, shared: int) -> Own:
    size = fields.integer("intermediate_size")
    count, used = take_experts(fields, 8, 2)
    own = take_factors(fields, sizes)
    experts = Experts(count, used, size, normed=True, shared=shared)
    parts = experts_of_all_layers(experts, shared)
    return own._replace(parts={**own.parts, **parts})


def granite_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors of a mixture with the decoder's names."""
    assert geometry.experts is not None
    halves = (f"{SHARED}.gate_proj", f"{SHARED}.up_proj")
    parts = dict.fromkeys(halves, geometry.experts.shared)
    return apart(split(renamed(tensors, NAMES), f"{SHARED}.gate_up_proj", parts), geometry)


GRANITE_MOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", positions=2048, own=_own, tensors=granite_tensors
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    own=_own_of_shared,
)
