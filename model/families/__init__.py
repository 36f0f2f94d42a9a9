"""The supported families. Each file describes how the models of a family differ from Llama."""

from eesd.model.families.apertus import APERTUS
from eesd.model.families.arcee import ARCEE
from eesd.model.families.cohere import COHERE, COHERE2
from eesd.model.families.cwm import CWM
from eesd.model.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MINICPM3,
    YOUTU,
)
from eesd.model.families.dots1 import DOTS1
from eesd.model.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from eesd.model.families.exaone4 import EXAONE4, EXAONE_MOE
from eesd.model.families.falcon_h1 import FALCON_H1
from eesd.model.families.gemma import GEMMA
from eesd.model.families.gemma2 import GEMMA2
from eesd.model.families.gemma3 import GEMMA3
from eesd.model.families.gemma4 import GEMMA4
from eesd.model.families.glm import GLM, GLM4
from eesd.model.families.glm4_moe import GLM4_MOE, SOLAR_OPEN
from eesd.model.families.gpt_oss import GPT_OSS
from eesd.model.families.granite import GRANITE
from eesd.model.families.granite_hybrid import GRANITE_HYBRID
from eesd.model.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from eesd.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from eesd.model.families.lfm2 import LFM2, LFM2_MOE
from eesd.model.families.llama import INTERNLM3, IQUESTCODER, LLAMA
from eesd.model.families.minimax_m2 import MINIMAX_M2
from eesd.model.families.ministral import MINISTRAL, MINISTRAL3
from eesd.model.families.mistral import MISTRAL
from eesd.model.families.mixtral import MIXTRAL
from eesd.model.families.nemotron import JAIS2, NEMOTRON
from eesd.model.families.olmo import OLMO
from eesd.model.families.olmo2 import OLMO2
from eesd.model.families.olmo3 import OLMO3
from eesd.model.families.olmoe import FLEX_OLMO, OLMOE
from eesd.model.families.phi import PHI
from eesd.model.families.phi3 import PHI3
from eesd.model.families.phimoe import PHIMOE
from eesd.model.families.qwen2 import QWEN2
from eesd.model.families.qwen2_moe import QWEN2_MOE
from eesd.model.families.qwen3 import QWEN3
from eesd.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from eesd.model.families.qwen3_moe import QWEN3_MOE
from eesd.model.families.qwen3_next import QWEN3_NEXT
from eesd.model.families.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE
from eesd.model.families.seed_oss import SEED_OSS
from eesd.model.families.smollm3 import SMOLLM3
from eesd.model.families.stablelm import STABLELM
from eesd.model.families.starcoder2 import STARCODER2
from eesd.model.families.vaultgemma import VAULTGEMMA
from eesd.model.family import Family

_DENSE = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GRANITE,
    SMOLLM3,
    OLMO2,
    OLMO3,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    HUNYUAN,
    INTERNLM3,
    IQUESTCODER,
    LFM2,
    GEMMA,
    SEED_OSS,
    EXAONE4,
    ERNIE4_5,
    GLM,
    GLM4,
    GRANITE_HYBRID,
    FALCON_H1,
    MINISTRAL,
    MINISTRAL3,
    ARCEE,
    APERTUS,
    COHERE,
    COHERE2,
    STABLELM,
    NEMOTRON,
    JAIS2,
    STARCODER2,
    CWM,
    VAULTGEMMA,
    QWEN3_5,
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    YOUTU,
    MINICPM3,
    PHI,
    OLMO,
)
_MIXED = (
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    QWEN2_MOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GPT_OSS,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    GLM4_MOE,
    SOLAR_OPEN,
    DOTS1,
    MINIMAX_M2,
    ERNIE4_5_MOE,
    LFM2_MOE,
    EXAONE_MOE,
    FLEX_OLMO,
    HUNYUAN_MOE,
    QWEN3_VL_MOE,
    PHIMOE,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*_DENSE, *_MIXED)}
"""Families by ``model_type``."""
