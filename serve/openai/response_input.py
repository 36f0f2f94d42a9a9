"""Translation of a Responses API request into a chat request."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eesd.common.checks import shown
from eesd.serve.http.errors import APIError, unsupported
from eesd.serve.openai.params import chat_of
from eesd.serve.openai.response_schemas import ContentPart, InputItem, ResponsesBody, TextOptions
from eesd.serve.openai.schemas import ChatBody, GenerationBody, TemplateBody

WHOLE = "send the whole input"
REFUSED = {
    "previous_response_id": (
        f"This server keeps no responses; leave previous_response_id out, and {WHOLE}."
    ),
    "conversation": f"This server keeps no conversations; leave conversation out, and {WHOLE}.",
    "background": "background is not supported; leave it out, and wait for the response.",
    "prompt": "This server has no stored prompts; leave prompt out, and send input.",
}
"""Fields that require a server that remembers responses."""
LOGPROBS = "message.output_text.logprobs"
CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that represents a custom tool for the model."""
TEXTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}


def as_chat(body: ResponsesBody, knows_developer: bool) -> ChatBody:
    """Return the chat request.

    Args:
        body: The body of the request.
        knows_developer: Whether the chat template supports messages of the role ``developer``. If
            not, they become system messages.

    Raises:
        APIError: The request asks for something that this server does not support.
    """
    extra = body.model_extra or {}
    for name, message in REFUSED.items():
        if extra.get(name):
            raise unsupported(name, message)
    if body.truncation == "auto":
        raise unsupported(
            "truncation",
            "truncation 'auto' is not supported; give 'disabled', and an input that fits.",
        )
    for name in ("n", "return_token_ids"):
        if getattr(body, name) not in (None, False, 1):
            raise unsupported(
                name,
                f"{name} is not supported in responses; leave it out, or ask for chat completions.",
            )
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not knows_developer:
        messages = [
            {**one, "role": "system"} if one["role"] == "developer" else one for one in messages
        ]
    fields = (*GenerationBody.model_fields, *TemplateBody.model_fields)
    shared = {name: getattr(body, name) for name in fields if name not in ("n", "stream_options")}
    unknown = {
        name: value
        for name, value in extra.items()
        if name not in ChatBody.model_fields and name not in REFUSED
    }
    unknown |= _without_effect(body)
    logprobs = LOGPROBS in (body.include or ())
    values = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": body.text and _response_format(body.text),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    return chat_of(unknown | shared | values)


def _without_effect(body: ResponsesBody) -> dict[str, Any]:
    """Return the values of the request that have no effect here. The keys are the names that the
    answer lists."""
    found: dict[str, Any] = {}
    if set(body.include or ()) - {LOGPROBS}:
        found["include"] = body.include
    if body.text and body.text.verbosity:
        found["text.verbosity"] = body.text.verbosity
    for name, value in ((body.reasoning and body.reasoning.model_extra) or {}).items():
        found[f"reasoning.{name}"] = value
    return found


def _messages(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for number, item in enumerate(given, 1):
        kind = item.type or ("message" if item.role is not None else None)
        read = _READERS.get(kind or "")
        if kind == "reasoning":
            thought = {
                "reasoning_content": _text(
                    item.content, number, "reasoning without text", joined=True
                )
            }
        elif read is None:
            raise unsupported("input", _unknown(kind, number))
        else:
            message = read(item, number)
            if thought and message["role"] == "assistant":
                message |= thought
            if (
                message.get("tool_calls")
                and messages
                and messages[-1]["role"] == "assistant"
                and not thought
            ):
                # This call is part of the same answer.
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                messages.append(message)
            thought = {}
    return messages


def _unknown(kind: str | None, number: int) -> str:
    if kind == "item_reference":
        wanted = f"{WHOLE} (clients do so with store: false)"
        return f"Input item {number} is a reference, and this server keeps no responses; {wanted}."
    return (
        f"Input item {number} is of type {shown(kind)}; this version reads messages, function "
        "calls and their outputs."
    )


def _message(item: InputItem, number: int) -> dict[str, Any]:
    if item.role is None:
        raise APIError(
            400,
            f"Input item {number} has no role; give one, such as user.",
            "input",
            "invalid_value",
        )
    return {"role": item.role, "content": _text(item.content, number, "a message without content")}


def _call(item: InputItem, number: int) -> dict[str, Any]:
    if item.call_id is None or item.name is None or item.arguments is None:
        message = (
            f"Input item {number} is a function call without call_id, name or arguments; give all "
            "three."
        )
        raise APIError(400, message, "input", "invalid_value")
    return _called(item.call_id, item.name, item.arguments)


def _custom_call(item: InputItem, number: int) -> dict[str, Any]:
    if item.call_id is None or item.name is None or item.input is None:
        message = (
            f"Input item {number} is a custom tool call without call_id, name or input; give all "
            "three."
        )
        raise APIError(400, message, "input", "invalid_value")
    return _called(item.call_id, item.name, json.dumps({"input": item.input}))


def _called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _output(item: InputItem, number: int) -> dict[str, Any]:
    if item.call_id is None:
        message = (
            f"Input item {number} is the output of a function without call_id; give that of the "
            "call."
        )
        raise APIError(400, message, "input", "invalid_value")
    return {
        "role": "tool",
        "tool_call_id": item.call_id,
        "content": _text(item.output, number, "no output", joined=True),
    }


_READERS: dict[str, Callable[[InputItem, int], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
}


def _text(
    given: str | Sequence[ContentPart] | None, number: int, nothing: str, joined: bool = False
) -> Any:
    """Return the content in the form that chat messages use. It is a text, or several parts if
    ``joined`` is False."""
    if given is None or (joined and not given and given != ""):
        raise APIError(
            400, f"Input item {number} has {nothing}; give text.", "input", "invalid_value"
        )
    if isinstance(given, str):
        return given
    texts = []
    for part in given:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXTS | {"refusal"}:
            message = (
                f"Input item {number} has a part of type {shown(part.type)}; this version reads "
                "text only."
            )
            raise unsupported("input", message)
        if text is None:
            raise APIError(
                400,
                f"Input item {number} has a part without text; give its text.",
                "input",
                "invalid_value",
            )
        texts.append(text)
    if joined or len(texts) < 2:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        tool = {**tool, "parameters": CUSTOM, "strict": True}
        form = tool.get("format")
        if isinstance(form, Mapping) and form.get("type") != "text":
            raise unsupported(
                "tools",
                f"The custom tool {shown(tool.get('name'))} has a format of type "
                f"{shown(form.get('type'))}, which is not supported; leave the format out, or "
                "give the tool as a function.",
            )
    elif kind != "function":
        raise unsupported(
            "tools",
            (
                f"The tool {shown(kind)} is not supported; turn it off in the client, because "
                "this server supports only functions and custom tools."
            ),
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if isinstance(given, dict) and given.get("type") == "custom":
        return {**given, "type": "function"}
    if isinstance(given, dict) and given.get("type") not in ("function", "allowed_tools"):
        message = (
            f"tool_choice of type {shown(given.get('type'))} is not supported; give none, auto, "
            "required, or a function."
        )
        raise unsupported("tool_choice", message)
    return given


def _response_format(text: TextOptions) -> dict[str, Any] | None:
    if text.format is None:
        return None
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    inner = text.format.model_extra or {}
    if inner.get("schema") is None:
        raise APIError(
            400, "text.format has no schema; give it as schema.", "text", "invalid_value"
        )
    return {"type": "json_schema", "json_schema": inner}
