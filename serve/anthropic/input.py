"""A request of the Messages API as the chat request that it is."""

import json
from collections.abc import Sequence
from typing import Any

from eesd.common.checks import shown
from eesd.serve.anthropic.schemas import Block, MessagesBody, PromptBody, Tool, ToolChoice, Turn
from eesd.serve.http.errors import APIError, unsupported
from eesd.serve.openai.params import chat_of
from eesd.serve.openai.schemas import ChatBody, GenerationBody

REFUSED = ("mcp_servers", "container", "context_management")
"""Fields that ask for what this server does not do."""
EFFORTS = {"enabled": "medium", "disabled": "none", "adaptive": None}


def as_chat(body: PromptBody) -> ChatBody:
    """The chat request. A last message of the assistant is gone on with.

    Raises:
        APIError: The request asks for what this server does not do.
    """
    extra = body.model_extra or {}
    for name in REFUSED:
        if extra.get(name):
            raise unsupported(name, f"{name} is not supported; leave it out.")
    if isinstance(body, MessagesBody):
        if body.n not in (None, 1) or body.return_token_ids:
            raise unsupported(
                "n",
                "n and return_token_ids are not supported in messages; ask for chat completions.",
            )
        shared = {
            name: getattr(body, name)
            for name in GenerationBody.model_fields
            if name not in ("n", "stream_options")
        }
        shared["max_tokens"] = body.max_tokens
    else:
        shared = {}
    system = (
        [] if body.system is None else [{"role": "system", "content": _text(body.system, "system")}]
    )
    messages = [message for turn in body.messages for message in _messages(turn)]
    last = body.messages[-1]
    config = body.output_config
    choice = body.tool_choice
    effort = EFFORTS[body.thinking.type] if body.thinking else None
    schema = config.format.schema_ if config and config.format else None
    values = {
        **{name: value for name, value in extra.items() if name not in ChatBody.model_fields},
        **shared,
        "messages": [*system, *messages],
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice(choice) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "reasoning_effort": (config.effort if config and config.effort else None) or effort,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": schema, "strict": True},
        }
        if schema
        else None,
        "continue_final_message": True
        if last.role == "assistant" and messages[-1].get("content")
        else None,
    }
    return chat_of(values)


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of calls are messages of their own, before the text
    beside them."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if block.type == "tool_result"]
    uses = [block for block in turn.content if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in turn.content if block.type == "thinking"]
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    texts = [block for block in turn.content if block.type not in others]
    found = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": _text(block.content or "", "messages"),
        }
        for block in results
    ]
    if not (texts or uses or thoughts) and results:
        return found
    message: dict[str, Any] = {"role": turn.role, "content": _text(texts, "messages")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if uses:
        message["tool_calls"] = [_call(block) for block in uses]
    return [*found, message]


def _call(block: Block) -> dict[str, Any]:
    if block.id is None or block.name is None or block.input is None:
        raise APIError(
            400, "A tool_use has no id, name or input; give all three.", "messages", "invalid_value"
        )
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": json.dumps(block.input)},
    }


def _text(given: str | Sequence[Block], param: str) -> str:
    if isinstance(given, str):
        return given
    for block in given:
        if block.type != "text":
            raise unsupported(
                param,
                f"A content has a block of type {shown(block.type)}; this version reads text only.",
            )
        if block.text is None:
            raise APIError(400, "A block of text has no text; give it.", param, "invalid_value")
    return "\n".join(str(block.text) for block in given)


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(
            "tools",
            (
                f"The tool {shown(tool.type)} is not supported; this server knows the client's "
                "own only."
            ),
        )
    values = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in values.items() if value is not None},
    }


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {
            "type": "function",
            "function": {} if choice.name is None else {"name": choice.name},
        }
    return choice.type
