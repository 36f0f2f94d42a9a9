"""Request bodies, answers and stream events of ``POST /v1/messages``
(https://docs.claude.com/en/api/messages)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eesd.serve.openai.schemas import INT64, Body, GenerationBody, Many, ResponseMetrics


class Block(Body):
    """A part of a message's content. Its type is ``text``, ``thinking``, ``tool_use`` or
    ``tool_result``."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | Blocks | None" = None


Blocks = Annotated[list[Block], Field(max_length=1 << 16, fail_fast=True)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(Body):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Amount(Body):
    """A number with its ``type``, which is ``input_tokens``, ``tool_uses`` or
    ``thinking_turns``."""

    type: str
    value: Annotated[int, Field(ge=0)]


class Edit(Body):
    """A rule for clearing parts of the messages (``clear_thinking_...``,
    ``clear_tool_uses_...``)."""

    type: str
    keep: Literal["all"] | Amount | None = None
    trigger: Amount | None = None


class ContextManagement(Body):
    edits: Annotated[list[Edit], Field(max_length=16, fail_fast=True)] | None = None


class PromptBody(Body):
    """The fields that make up the prompt."""

    messages: Annotated[list[Turn], Many]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], Field(max_length=1 << 10, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None


class CountBody(PromptBody):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None


class MessagesBody(GenerationBody, PromptBody):
    """``POST /v1/messages``. The fields of :class:`~eesd.serve.openai.schemas.GenerationBody` are
    this server's extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=INT64)]


class AnswerBlock(BaseModel):
    """A part of an answer, which has the fields of its ``type``."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsage(BaseModel):
    """Numbers of tokens. ``input_tokens`` counts prompt tokens that were not cached by earlier
    requests."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(BaseModel):
    """An answer. ``stop_reason`` is ``end_turn``, ``max_tokens``, ``stop_sequence`` or
    ``tool_use``."""

    id: str
    type: str
    role: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: ResponseMetrics | None = None
    ignored_keywords: list[str] | None = None


class MessageEvent(BaseModel):
    """An event of a stream. Its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str


class Count(BaseModel):
    input_tokens: int
