"""Dense models of Granite 4 are Granite with attention in all layers. Some models have no rotary
embedding. Mamba layers and experts are refused."""

from eesd.common.checks import shown
from eesd.common.geometry import UNROTATED, Geometry
from eesd.model.families.granite import take_factors
from eesd.model.family import Family, Own, Sizes, Tensors, gate_and_up, renamed
from eesd.model.fields import Fields

TYPES = ("attention", "full_attention")
"""The names of layers with attention in old configs and in configs that transformers 5 writes."""
NAMES = {
    "shared_mlp.input_linear": "mlp.gate_up_proj",
    "shared_mlp.output_linear": "mlp.down_proj",
}


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = fields.take("layer_types", fields.take("layers_block_type", None))
    if (
        not isinstance(types, list)
        or len(types) != sizes.layers
        or any(one not in TYPES for one in types)
    ):
        raise ValueError(
            f"layer_types is {shown(types)}, and must have attention for each of the "
            f"{sizes.layers} layers; layers of Mamba are not supported"
        )
    if fields.integer("num_local_experts", 8, least=0):
        raise ValueError("it has experts beside an MLP, which is not supported")
    without = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    of_mamba = {name for name in fields.raw if name.startswith("mamba_")}
    fields.taken |= {*without, "time_step_limit"} | of_mamba
    own = take_factors(fields, sizes)
    parts = {"intermediate_size": fields.integer("shared_intermediate_size", 1024)}
    if fields.text("position_embedding_type") != "rope":
        parts["layer_kinds"] = (UNROTATED,) * sizes.layers
    return own._replace(parts={**own.parts, **parts})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    return gate_and_up(renamed(tensors, NAMES), geometry)


GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    positions=2048,
    own=_own,
    tensors=_tensors,
)
