"""Read the text model of a checkpoint that also reads images. The text model has a part of
``config.json`` and some of the tensors. The other parts of the checkpoint are left out."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from eesd.common.checks import shown
from eesd.model.safetensors_file import CheckpointTensor


class Whole(NamedTuple):
    """A model with several parts.

    Attributes:
        architecture: Class in transformers.
        text: Possible types of its text model. The first is the default.
        defaults: Defaults of the text model's fields for which the family has no default.
        tied: Default of ``tie_word_embeddings``.
        flat: Whether published configs have the text model's fields next to the whole model's.
    """

    architecture: str
    text: tuple[str, ...]
    defaults: Mapping[str, Any]
    tied: bool = True
    flat: bool = False


_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_QWEN2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
WHOLES = {
    "gemma3": Whole("Gemma3ForConditionalGeneration", ("gemma3_text",), _GEMMA3),
    "gemma4": Whole("Gemma4ForConditionalGeneration", ("gemma4_text",), _GEMMA4),
    "mistral3": Whole("Mistral3ForConditionalGeneration", ("mistral", "ministral3"), {}),
    "qwen2_vl": Whole(
        "Qwen2VLForConditionalGeneration", ("qwen2_vl_text",), _QWEN2_VL, tied=False, flat=True
    ),
    "qwen2_5_vl": Whole(
        "Qwen2_5_VLForConditionalGeneration", ("qwen2_5_vl_text",), _QWEN2_VL, tied=False, flat=True
    ),
    "qwen3_vl": Whole("Qwen3VLForConditionalGeneration", ("qwen3_vl_text",), {}, tied=False),
    "qwen3_vl_moe": Whole(
        "Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",), {}, tied=False
    ),
    "qwen3_5": Whole("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",), {}, tied=False),
    "qwen3_5_moe": Whole(
        "Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",), {}, tied=False
    ),
}
"""Models with several parts, by their ``model_type``."""
_TEXT = re.compile(
    r"(model\.language_model\.|language_model\.model\.|model\.(?=embed_tokens\.|layers\.|norm\.))"
    r"|language_model\.(?=lm_head\.)"
)
"""Prefix of the text model's tensors. transformers 4 and 5 write different prefixes."""
_OF_WHOLE = (
    *("model_type", "architectures", "vision_config", "image_token_id", "video_token_id"),
    *("vision_token_id", "vision_start_token_id", "vision_end_token_id"),
)
"""Fields that concern only the whole model, in a config without parts."""
_OF_ALL_PARTS = (
    *("dtype", "torch_dtype", "bos_token_id", "eos_token_id"),
    *("quantization_config", "compression_config", "transformers_weights"),
)
"""Fields of the whole model that also apply to the text model."""


def text_fields(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the text model's fields in a ``config.json`` and the class of the whole model. For a
    plain text model, return all fields and an empty name.

    Raises:
        ValueError: The text model has another type, or there is no text model.
    """
    whole = WHOLES.get(str(raw.get("model_type")))
    if whole is None:
        return dict(raw), ""
    names = raw.get("architectures")
    text = raw.get("text_config")
    if text is None and whole.flat:
        text = {name: one for name, one in raw.items() if name not in _OF_WHOLE}
    if names not in (None, [whole.architecture]):
        raise ValueError(f"architectures is {shown(names)}, and must be {whole.architecture}")
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {shown(text)}, and must be an object")
    found = dict(whole.defaults) | {"model_type": whole.text[0]} | text
    if found["model_type"] not in whole.text:
        raise ValueError(
            f"the text model of {whole.architecture} is of the type {shown(found['model_type'])}; "
            f"supported are {', '.join(whole.text)}"
        )
    shared = {name: raw[name] for name in _OF_ALL_PARTS if raw.get(name) is not None}
    tied = raw.get("tie_word_embeddings", whole.tied)
    if whole.flat:  # older configs have the field in the text model's part
        tied = tied or found.get("tie_word_embeddings", False)
    return found | shared | {"architectures": None, "tie_word_embeddings": tied}, whole.architecture


def text_tensors(stored: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Return the text model's tensors in a model with several parts, with the names that they have
    in a plain text model."""
    found = {}
    for name, tensor in stored.items():
        prefix = _TEXT.match(name)
        if prefix:
            found[("model." if prefix[1] else "") + name[prefix.end() :]] = tensor
        elif name.startswith("lm_head."):
            found[name] = tensor
    return found
