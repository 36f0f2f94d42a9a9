"""Read ``generation_config.json``, which has the sampling options of a model's authors and the
tokens that end a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.manifest import SAMPLING_OPTIONS, SamplingDefaults
from eesd.model.fields import Fields

GENERATION_CONFIG_FILE = "generation_config.json"
NOT_APPLIED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Options that would change the tokens but are not applied. Each has the value that has no
effect."""
GENERATION_FIELDS = (*SAMPLING_OPTIONS, "do_sample", *NOT_APPLIED)


@dataclass(frozen=True)
class GenerationConfig:
    """The parts of a ``generation_config.json`` that EESD uses.

    Attributes:
        sampling: The sampling options. If ``do_sample`` is false, only the repetition penalty is
            kept, because it also applies to greedy decoding.
        eos_token_ids: Tokens that end a text, or None if the file does not name them.
    """

    sampling: SamplingDefaults
    eos_token_ids: tuple[int, ...] | None


def parse_generation_config(raw: Mapping[str, Any], name: str) -> GenerationConfig:
    """Parse the fields of a generation config called ``name``. Raises :class:`EESDError` for values
    of wrong types."""
    try:
        return _parse(Fields(raw))
    except ValueError as error:
        raise EESDError(f"{name} cannot be used: {error}; correct the file.") from None


def _parse(fields: Fields) -> GenerationConfig:
    sampling: dict[str, Any] = {
        name: fields.number(name, None, optional=True)
        for name in SAMPLING_OPTIONS
        if name != "top_k"
    }
    sampling["top_k"] = fields.integer("top_k", None, optional=True, least=-1)
    if sampling["top_k"] == -1:  # vLLM's value for off
        sampling["top_k"] = 0
    sample = fields.take("do_sample", None)
    if sample not in (None, True, False):
        raise ValueError("do_sample must be true or false")
    if sample is False:
        sampling = {"repetition_penalty": sampling["repetition_penalty"]}
    elif sample and sampling["temperature"] is None:
        sampling["temperature"] = 1.0
    not_applied = tuple(
        name
        for name, off in NOT_APPLIED.items()
        if fields.take(name, None) not in (None, off, [], {})
    )
    return GenerationConfig(
        SamplingDefaults(**sampling, not_applied=not_applied), fields.token_ids("eos_token_id")
    )
