"""Translation of a Messages API request into a chat request."""

import json
from collections.abc import Sequence
from typing import Any

from eesd.common.checks import shown
from eesd.serve.anthropic.schemas import (
    Amount,
    Block,
    Edit,
    MessagesBody,
    PromptBody,
    Tool,
    ToolChoice,
    Turn,
)
from eesd.serve.http.errors import APIError, unsupported
from eesd.serve.openai.params import chat_of
from eesd.serve.openai.schemas import ChatBody, GenerationBody

REFUSED = ("mcp_servers", "container")
"""Fields for features that this server does not support."""
BILLING = "x-anthropic-billing-header:"
"""The start of a line that Claude Code puts before its system prompt. The line has different digits
in each request. The line is left out, because with it no cached prefix would match the next
request."""
SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_")
"""Types of tools that Anthropic's servers run."""
THOUGHTS = ("thinking", "redacted_thinking")
EFFORTS = {"enabled": "medium", "disabled": "none", "adaptive": None}


def as_chat(body: PromptBody) -> ChatBody:
    """Return the chat request. If the last message is from the assistant, the answer continues it.

    Raises:
        APIError: The request asks for something that this server does not support.
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
    turns = _edited(body)
    messages = [message for turn in turns for message in _messages(turn)]
    goes_on = turns[-1].role == "assistant" and bool(messages[-1].get("content"))
    choice = body.tool_choice
    values = {
        **{name: value for name, value in extra.items() if name not in ChatBody.model_fields},
        **shared,
        "messages": [*_system(body.system), *messages],
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": choice and _choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "continue_final_message": goes_on or None,
    }
    if body.thinking:
        values["reasoning_effort"] = EFFORTS[body.thinking.type]
    if config := body.output_config:
        values["reasoning_effort"] = config.effort or values.get("reasoning_effort")
        if config.format:
            schema = {"schema": config.format.schema_, "strict": True}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat_of(values)


def _system(given: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """Return the system message, if there is one. Claude Code's line, which changes with every
    request, is left out."""
    if given is None:
        return []
    if isinstance(given, str):
        if given.startswith(BILLING):
            given = given.partition("\n")[2]
    else:
        given = [block for block in given if not (block.text or "").startswith(BILLING)]
    return [{"role": "system", "content": _text(given, "system")}] if given else []


def _edited(body: PromptBody) -> list[Turn]:
    """Return the turns without the thoughts that ``context_management`` clears. :func:`check_edits`
    handles other edits.

    Raises:
        APIError: The request asks for an unknown edit.
    """
    turns = body.messages
    for edit in _edits(body):
        if edit.type.startswith("clear_thinking_"):
            turns = _without_thoughts(turns, edit)
        elif not edit.type.startswith("clear_tool_uses_"):
            raise unsupported(
                "context_management",
                f"The edit {shown(edit.type)} is not supported; leave it out.",
            )
    return turns


def _edits(body: PromptBody) -> Sequence[Edit]:
    return (body.context_management and body.context_management.edits) or ()


def _without_thoughts(turns: list[Turn], edit: Edit) -> list[Turn]:
    """Return the turns without the older thoughts. The last ``edit.keep`` turns that have thoughts
    (by default one turn) keep them."""
    if edit.keep == "all":
        return turns
    left = edit.keep.value if edit.keep else 1
    found: list[Turn] = []
    for turn in reversed(turns):
        rest = turn.content
        if not isinstance(rest, str):
            rest = [block for block in rest if block.type not in THOUGHTS]
        if len(rest) < len(turn.content):
            left -= 1
            if left < 0:
                turn = turn.model_copy(update={"content": rest})
        found.append(turn)
    return found[::-1]


def check_edits(body: PromptBody, tokens: int) -> None:
    """Refuse a request for which ``context_management`` would clear tool results, because this
    server cannot clear them. This is the case if the prompt has too many tokens or too many tool
    uses.

    Raises:
        APIError: There are tool results that would have to be cleared.
    """
    blocks = [block for turn in body.messages for block in turn.content]
    uses = sum(isinstance(block, Block) and block.type == "tool_use" for block in blocks)
    for edit in _edits(body):
        trigger = edit.trigger or Amount(type="input_tokens", value=100_000)
        have = uses if trigger.type == "tool_uses" else tokens
        if edit.type.startswith("clear_tool_uses_") and have > trigger.value:
            raise unsupported(
                "context_management",
                (
                    f"The request has {have} {trigger.type}, so {edit.type} would clear tool "
                    f"results beyond {trigger.value}, which this server does not support; leave "
                    "the edit out, or shorten the messages."
                ),
            )


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """Return a turn as chat messages. The results of calls become separate messages, which come
    before the turn's text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if block.type == "tool_result"]
    uses = [block for block in turn.content if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in turn.content if block.type == "thinking"]
    others = ("tool_result", "tool_use", *THOUGHTS)
    texts = [block for block in turn.content if block.type not in others]
    found = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": _text(block.content or "", "messages", "A result of a tool"),
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


def _text(given: str | Sequence[Block], param: str, place: str = "A content") -> str:
    if isinstance(given, str):
        return given
    for block in given:
        if block.type != "text":
            raise unsupported(
                param,
                (
                    f"{place} has a block of type {shown(block.type)}, but this version reads "
                    "text only; leave the block out, and do not let an agent read such files."
                ),
            )
        if block.text is None:
            raise APIError(400, "A text block has no text; give its text.", param, "invalid_value")
    return "\n".join(str(block.text) for block in given)


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        remedy = "give it as a tool with a description and an input_schema"
        if tool.type.startswith(SERVER_TOOLS):
            remedy = (
                "Anthropic's servers run it: switch it off in the client (in Claude Code, deny "
                "WebSearch and WebFetch)"
            )
        raise unsupported("tools", f"The tool {shown(tool.type)} is not supported; {remedy}.")
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
