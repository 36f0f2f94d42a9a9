"""Convert a request body into requests for the batch."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from eesd.common.checks import shown
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM
from eesd.runtime.request import Constraint, Request
from eesd.serve.grammar.fields import FIELDS, constraint_of
from eesd.serve.grammar.token_filter import TokenFilter, word_tokens
from eesd.serve.grammar.tools import Tools
from eesd.serve.http.errors import APIError, unsupported
from eesd.serve.http.options import Serving
from eesd.serve.openai.schemas import ALIASES, Body, ChatBody, GenerationBody, TemplateBody

SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NEUTRAL: dict[str, Any] = {
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1,
    "logits_processors": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "add_special_tokens": False,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": [],
    "functions": [],
    "function_call": "none",
    "reasoning_effort": None,
    "audio": None,
    "modalities": ["text"],
    "web_search_options": None,
    "prompt_embeds": None,
    "thinking_token_budget": None,
    "structural_tag": None,
    "stop_regex": None,
    "custom_logit_processor": None,
    "lora_path": None,
    "extra_body": {},
    "vllm_xargs": {},
    **dict.fromkeys(("options", "lora", "samplers"), None),
    **dict.fromkeys(("typical_p", "tfs_z", "num_beams", "guidance_scale", "cfg_scale"), 1),
    **dict.fromkeys(
        ("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "smoothing_factor"), 0
    ),
    **dict.fromkeys(
        ("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "no_repeat_ngram_size"), 0
    ),
    "top_n_sigma": -1,
    **dict.fromkeys(ALIASES, None),
    **{"do_sample": True, "negative_prompt": "", "echo": False},
}
"""Fields that shape the text in the APIs of OpenAI, vLLM, SGLang, llama.cpp, Ollama and
transformers, but that this server does not support. Each field is mapped to the value that has no
effect. An alias is refused if the request also gives the field that it stands for, or if there is
no such field."""
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
MOST_NAMED = 32
"""Maximum number of ignored fields that an answer lists."""


def chat_of(values: dict[str, Any]) -> ChatBody:
    """Make the chat request that corresponds to a request of another API. Values that are None are
    left out.

    Raises:
        RequestValidationError: A field that exists only in chat requests has a value that cannot be
            used. The error has the field's name in the other API.
    """
    try:
        return ChatBody.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


def check_supported(body: Body, choices: int = 1) -> None:
    """Refuse unsupported fields that would change the text, instead of ignoring them.

    Args:
        body: The body of the request. The fields declared by its class are supported.
        choices: Number of texts for each prompt.

    Raises:
        APIError: A field has a value that is not supported.
    """
    unknown = body.model_extra or {}
    for name, neutral in (NEUTRAL | {"best_of": choices}).items():
        value = unknown.get(name)
        if value is not None and value != neutral:
            wanted = "leave it out" if neutral is None else f"leave it out or give {neutral!r}"
            raise unsupported(name, f"{name} {shown(value)} is not supported; {wanted}.")


class Named(Protocol):
    """A body that may name a model."""

    model: str | None

    @property
    def model_extra(self) -> dict[str, Any] | None: ...


def admit(body: Named, request: HTTPRequest, serving: Serving) -> None:
    """Check the model that a body names. The body's fields that have no effect are recorded for the
    answer and the log.

    Raises:
        APIError: The model does not exist.
    """
    check_model(body.model, serving)
    request.state.model = body.model or serving.model_name
    read = {*NEUTRAL, "best_of", "repeat_last_n"}
    if isinstance(body, GenerationBody):
        read |= FIELDS
    if isinstance(body, TemplateBody):
        read |= TOOLS
    ignored = [name for name in body.model_extra or () if name not in read]
    request.state.ignored_fields = [*filter(_NAME.fullmatch, ignored)][:MOST_NAMED]


def check_model(model: str | None, serving: Serving) -> None:
    """Raise :class:`APIError` (404) for the name of another model. An empty or missing name stands
    for the served model."""
    if model and model not in serving.model_names:
        names = ", ".join(map(repr, serving.model_names))
        raise APIError(
            404,
            f"There is no model {shown(model)}; this server has {names}.",
            "model",
            "model_not_found",
        )


def check_ids(tokens: Sequence[int], llm: LLM, field: str) -> None:
    """Raise :class:`APIError` for ids that the model does not have, which a tokenizer cannot
    decode."""
    size = llm.manifest.geometry.vocab_size
    if any(token >= size for token in tokens):
        raise APIError(
            400, f"A token id is too large; the model has {size} tokens.", field, "invalid_value"
        )


def check_prompt(tokens: Sequence[int], serving: Serving) -> None:
    """Raise :class:`APIError` for a prompt that is longer than the server allows."""
    most = min(
        serving.options.max_prompt_tokens or serving.max_model_len, serving.max_model_len - 1
    )
    if len(tokens) > most:
        message = f"The prompt has {len(tokens)} tokens; give at most {most}."
        raise APIError(400, message, code="context_length_exceeded")


def requests_of(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    serving: Serving,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    tools: Tools | None = None,
    key: str = "",
) -> list[Request]:
    """Make the requests for all choices. Requests with the same prompt are adjacent.

    Args:
        body: The body.
        prompts: Token ids of each prompt.
        serving: The server.
        max_tokens: Maximum number of new tokens in a choice, or None for the largest number that
            fits.
        logprobs, prompt_logprobs: Number of alternatives to report for each token, or None if no
            log-probabilities are wanted.
        tools: Functions that may or must be called.
        key: The key that sent the request. Cached prefixes of its prompts are not shared with other
            keys.

    Raises:
        APIError, EESDError: The server cannot fulfil the request.
    """
    check_supported(body, body.choices)
    texts = len(prompts) * body.choices
    most = serving.options.max_n
    places = serving.service.places
    if texts > min(most, places):  # not 429, which would tell clients to retry
        limit = f"ask for at most {most}" if texts > most else f"this server has {places} places"
        raise APIError(400, f"The request asks for {texts} texts; {limit}.", "n")
    llm = serving.service.llm
    chosen = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    if body.top_k is not None:
        chosen["top_k"] = max(body.top_k, 0)
    if body.logit_bias is not None:
        chosen["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        check_ids(list(chosen["logit_bias"]), llm, "logit_bias")
    check_ids(body.stop_token_ids or (), llm, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), llm, "allowed_token_ids")
    if body.sampling_method is not None:
        chosen["method"] = body.sampling_method
    if body.seed is not None:
        chosen["seed"] = body.seed % 2**63
    sampling = replace(llm.default_sampling, **chosen)
    _check_window(body, sampling)
    requests = []
    for number, tokens in enumerate(prompts):
        check_prompt(tokens, serving)
        room = serving.max_model_len - len(tokens)
        fits = serving.service.longest - len(tokens)
        for choice in range(body.choices):
            request = Request(
                tokens=tokens,
                sampling=sampling.of_text(number, choice),
                max_new_tokens=max(
                    1, min(room, fits) if max_tokens is None else min(max_tokens, room)
                ),
                stop=body.stops,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                draft=body.draft is not False,
                ignore_eos=bool(body.ignore_eos),
                min_tokens=body.min_tokens or 0,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                seconds=serving.options.request_timeout,
                constraint=_constraint(body, llm, tools),
                salt=f"{key} {body.cache_salt or ''}",
            )
            requests.append(request)
    return requests


def _check_window(body: Body, sampling: Sampling) -> None:
    """Refuse a penalty window if there are penalties, because penalties count all tokens."""
    window = (body.model_extra or {}).get("repeat_last_n")
    if window in (None, -1) or not (sampling.counts or sampling.repetition_penalty != 1):
        return
    raise unsupported(
        "repeat_last_n",
        (
            f"repeat_last_n {shown(window)} is not supported with a penalty, because "
            "penalties count all tokens; give -1, or leave the penalties out."
        ),
    )


def _constraint(body: GenerationBody, llm: LLM, tools: Tools | None) -> Constraint | None:
    """Return the constraint of the output. It requires calls or is the constraint of the body, and
    the body's lists of allowed and forbidden tokens are added to it. ``response_format`` applies to
    answers without calls."""
    given = body.given()
    asked = constraint_of(given, llm)
    answer = asked if (given.get("response_format") or {}).get("type", "text") != "text" else None
    calls = tools.constraint(llm, answer) if tools else None
    if asked is not answer and calls is not None:
        raise APIError(
            400,
            (
                "tool_choice requires a call, but another field constrains the output; give "
                "one of them."
            ),
            "tool_choice",
        )
    words = word_tokens(body.bad_words, llm.codec) if body.bad_words else []
    if not words and body.allowed_token_ids is None:
        return calls or asked
    return TokenFilter(
        llm.manifest.geometry.vocab_size, body.allowed_token_ids, words, calls or asked
    )
