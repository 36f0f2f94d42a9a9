"""VaultGemma is Gemma 2 without norms after attention and MLP."""

from dataclasses import replace

from eesd.common.geometry import Geometry
from eesd.model.families.gemma import whole_norms
from eesd.model.families.gemma2 import GEMMA2
from eesd.model.family import Own, Sizes, Tensors, renamed
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    own = GEMMA2.own(fields, sizes)
    return own._replace(parts={**own.parts, "norm_behind": False})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    names = {"pre_feedforward_layernorm": "post_attention_layernorm"}
    return whole_norms(renamed(tensors, names), geometry)


VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    own=_own,
    tensors=_tensors,
    gguf=None,
)
