"""Phi-3.5-MoE has LayerNorms and biases (even of the logits). A token uses two experts. The
share of each is computed from the router's logits that are close to the expert's logit."""

from eesd.common.architecture import LOGIT_BIAS, ROUTER
from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import apart, experts_of_all_layers, take_experts
from eesd.model.families.mixtral import renamed_experts
from eesd.model.family import Family, Own, Sizes, Tensors, attention_biases, take_window
from eesd.model.fields import Fields


def _rope_fields(fields: Fields) -> Fields:
    """Return the rotary fields. ``short_mscale`` is the factor of cos and sin."""
    found = dict(fields.raw)
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.take(name, None)
        if not isinstance(given, dict) or "short_mscale" not in given:
            continue
        own = {key: one for key, one in given.items() if key not in ("short_mscale", "long_mscale")}
        found[name] = own | {"attention_factor": given["short_mscale"]}
    return fields.changed(found)


def _own(fields: Fields, _: Sizes) -> Own:
    size = fields.integer("intermediate_size")
    count, used = take_experts(fields, 16, 2)
    if used != 2:
        raise ValueError(f"num_experts_per_tok is {used}, and must be 2 for sparsemixer")
    fields.taken |= {"input_jitter_noise", "hidden_dropout"}  # only in training
    margin = 2 * fields.number("router_jitter_noise", 0.01)
    experts = Experts(count, used, size, normed=False, scores="sparsemixer", margin=margin)
    parts = (
        attention_biases(fields)
        | experts_of_all_layers(experts)
        | {
            "centred_norms": True,
            "norm_bias": True,
            "logit_bias": fields.flag("lm_head_bias"),
        }
    )
    return Own(parts, take_window(fields))


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    names = {"lm_head.bias": f"{LOGIT_BIAS}.weight"}
    found = {
        names.get(name, name).replace(".mlp.router.", f".{ROUTER}."): tensor
        for name, tensor in renamed_experts(tensors).items()
    }
    return apart(found, geometry)


PHIMOE = Family(
    "phimoe",
    "PhimoeForCausalLM",
    published="PhiMoEForCausalLM",
    positions=131072,
    kv_heads=8,
    kv_heads_null=False,
    theta=1e6,
    eps=1e-5,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
)
