"""``generation_config.json``: how the authors of a model want its tokens chosen, and which tokens end a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.json_input import Fields, read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling options that are taken over. vLLM takes the same by default."""
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
"""Options that would change the tokens and are not applied, with the value that has no effect."""
GENERATION_FIELDS = (*SAMPLING_OPTIONS, "do_sample", *NOT_APPLIED)
REMEDY = "correct it in the model and export again, or give --generation-config none"


@dataclass(frozen=True)
class GenerationConfig:
    """What is used of a ``generation_config.json``.

    Attributes:
        sampling: Values of those of :data:`SAMPLING_OPTIONS` that the file gives. With ``do_sample: false`` only the repetition
            penalty, which also applies to greedy decoding.
        eos_token_ids: Tokens that end a text; None if the file does not say.
        not_applied: Names of options in the file that would change the tokens and are not applied.
    """

    sampling: dict[str, Any]
    eos_token_ids: tuple[int, ...] | None
    not_applied: tuple[str, ...]

    @property
    def notice(self) -> str:
        """One line about the options that are not applied; empty if there are none."""
        names = ", ".join(self.not_applied)
        return f"{GENERATION_CONFIG_FILE}: not applied: {names}; transformers may give other tokens." if names else ""


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """Read the ``generation_config.json`` of an engine directory; None if there is none.

    Raises:
        EESDError: The file is damaged.
    """
    path = directory / GENERATION_CONFIG_FILE
    return parse_generation_config(read_json_object(path, REMEDY), str(path)) if path.exists() else None


def parse_generation_config(raw: Mapping[str, Any], name: str, remedy: str = REMEDY) -> GenerationConfig:
    """Parse the fields of a generation config called ``name``. Raises :class:`EESDError` for values of wrong types."""
    try:
        return _parse(Fields(raw))
    except ValueError as error:
        raise EESDError(f"{name} cannot be used: {error}; {remedy}.") from None


def _parse(fields: Fields) -> GenerationConfig:
    sampling: dict[str, Any] = {name: fields.number(name, None, optional=True) for name in SAMPLING_OPTIONS if name != "top_k"}
    sampling["top_k"] = fields.integer("top_k", None, optional=True, least=-1)
    if sampling["top_k"] == -1:  # vLLM's way to say that it is off
        sampling["top_k"] = 0
    sample = fields.take("do_sample", None)
    if sample not in (None, True, False):
        raise ValueError("do_sample must be true or false")
    if sample is False:
        sampling = {"repetition_penalty": sampling["repetition_penalty"]}
    elif sample and sampling["temperature"] is None:
        sampling["temperature"] = 1.0
    given = {name: sampling[name] for name in SAMPLING_OPTIONS if sampling.get(name) is not None}
    not_applied = (name for name, off in NOT_APPLIED.items() if fields.take(name, None) not in (None, off, [], {}))
    return GenerationConfig(given, fields.token_ids("eos_token_id"), tuple(not_applied))
