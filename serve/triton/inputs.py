"""Convert the tensors of a Triton request into a request for the batch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.json_input import parse_json
from eesd.runtime.llm import LLM
from eesd.runtime.request import Request

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
GUIDES = {
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "choice": "choice",
}
"""The kinds of guides under the names that tensorrtllm_backend uses. ``choice`` (a list in JSON) is
an addition of this project."""


@dataclass(frozen=True)
class Asked:
    """The request of a client.

    Attributes:
        request: The request for the batch.
        guide: Kind and value of the output constraint for :func:`eesd.make_constraint`, or None if
            the output is unconstrained.
        stream: Whether each round's tokens are sent in a separate response.
        prefix: Text to put before the first response's text.
    """

    request: Request
    guide: tuple[str, Any] | None
    stream: bool
    prefix: str


def read_request(triton_request: Any, llm: LLM) -> Asked:
    """Read the inputs of a Triton request. The model's defaults apply to missing inputs.

    Raises:
        EESDError: An input cannot be used.
    """
    given = {tensor.name(): tensor for tensor in triton_request.inputs()}
    text, messages = (_text(name, _value(given, name)) for name in ("text_input", "messages"))
    if (text is None) + (messages is None) + ("input_ids" not in given) != 2:
        raise EESDError("A request needs exactly one of text_input, messages and input_ids.")
    if messages is not None:
        tokens = llm.encode(_chat(messages))
    elif text is not None:
        tokens = llm.encode(text)
    else:
        tokens = _tokens(given["input_ids"])
    options: dict[str, Any] = {
        field: _value(given, name)
        for field, name in (
            ("max_new_tokens", "max_tokens"),
            ("min_tokens", "min_tokens"),
            ("ignore_eos", "ignore_eos"),
        )
        if name in given
    }
    if triton_request.timeout() > 0:  # microseconds
        options["seconds"] = triton_request.timeout() / 1e6
    if _value(given, "return_log_probs") is True:
        options["logprobs"] = 0
    words = _texts("stop_words", given["stop_words"].as_numpy()) if "stop_words" in given else []
    request = Request(
        tokens=tokens,
        sampling=replace(llm.default_sampling, **_sampling(given)),
        # Clients without a stop word send an empty word.
        stop=tuple(word for word in words if word),
        **options,
    )
    prefix = ""
    if _value(given, "exclude_input_in_output") is False:
        prefix = llm.codec.decode(tokens) if text is None else text
    return Asked(request, _guide(given), _value(given, "stream") is True, prefix)


def _tokens(tensor: Any) -> list[int]:
    """Return the token ids. They are read through DLPack directly from the memory that the server
    wrote."""
    return [int(token) for token in np.from_dlpack(tensor).reshape(-1)]


def _chat(text: str) -> list[Any]:
    """Parse chat messages from JSON. The codec checks each message."""
    messages = parse_json(text, "messages", 'give [{"role": "user", "content": "..."}]')
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise EESDError(
            'messages is not a list of JSON objects; give [{"role": "user", "content": "..."}].'
        )
    return messages


def _guide(given: dict[str, Any]) -> tuple[str, Any] | None:
    kind, guide = (
        _text(name, _value(given, name))
        for name in ("guided_decoding_guide_type", "guided_decoding_guide")
    )
    if not kind and not guide:
        return None
    if kind not in GUIDES:
        raise EESDError(
            f"guided_decoding_guide_type is {shown(kind)}; give one of {', '.join(GUIDES)}."
        )
    if kind == "json" and not guide:
        return "json", {"type": "object"}
    if not guide:
        raise EESDError(f"guided_decoding_guide is missing, but the type is {kind}; give a guide.")
    read = kind in ("json", "json_schema", "choice")
    return GUIDES[kind], parse_json(guide, "guided_decoding_guide", "give JSON") if read else guide


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: _value(given, name) for name in SAMPLING if name in given}
    if chosen.get("top_k", 0) < 0:  # some clients send -1 to allow all tokens
        chosen["top_k"] = 0
    seeds = [_value(given, name) for name in ("seed", "random_seed") if name in given]
    if len(set(seeds)) > 1:
        raise EESDError("seed and random_seed differ; give one of them.")
    if seeds:
        chosen["seed"] = seeds[0]
    return chosen


def _value(given: dict[str, Any], name: str) -> Any:
    """Return the value of an input with one element, or None if the input is missing."""
    if name not in given:
        return None
    value = given[name].as_numpy().reshape(-1)[0]
    if isinstance(value, np.floating):
        # 0.95 in float32 means the 0.95 that the client wrote, not 0.949999988.
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def _text(name: str, value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        raise EESDError(f"{name} is not UTF-8 text; give UTF-8.") from None


def _texts(name: str, values: Any) -> list[str]:
    return [_text(name, value) or "" for value in values.reshape(-1)]
