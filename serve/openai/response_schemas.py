"""Request bodies, answers and stream events of ``POST /v1/responses``."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eesd.runtime.request import MAX_LOGPROBS
from eesd.serve.openai.schemas import (
    INT64,
    Body,
    ChatLogprob,
    Effort,
    GenerationBody,
    Many,
    ResponseMetrics,
    TemplateBody,
)

Objects = Annotated[list[dict[str, Any]], Field(max_length=1 << 10, fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=1 << 10, fail_fast=True)]


class ContentPart(Body):
    """A part of an item's content. Its type is ``input_text``, ``output_text``, ``refusal``, ..."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]


class InputItem(Body):
    """An item of the input. It is a message, which has a ``role`` and ``content``, or its ``type``
    says what it is: a ``function_call``, a ``custom_tool_call``, the output of one of these, or
    ``reasoning``."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None


class TextFormat(Body):
    """The form of the output. If ``type`` is ``json_schema``, the field ``schema`` has the
    schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    effort: (
        Annotated[
            Effort, Field(description="Reasoning effort to pass to chat templates that support it.")
        ]
        | None
    ) = None


class ResponsesBody(GenerationBody, TemplateBody):
    """The body of ``POST /v1/responses``. The server does not remember earlier responses."""

    input: str | Annotated[list[InputItem], Many]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: (
        Annotated[
            Strings,
            Field(
                description=(
                    "Additional output to include. Only `message.output_text.logprobs` is "
                    "supported, and other values are ignored."
                )
            ),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: Annotated[bool, Field(description="Ignored. Responses are never stored.")] | None = None
    user: str | None = None


class OutputText(BaseModel):
    """A part of a message, or the text of a thought. A thought has no annotations or
    log-probabilities."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChatLogprob] | None = None


class OutputItem(BaseModel):
    """An item of the output. It is a message of the model, the model's thoughts (``reasoning``), a
    call of a function (whose ``arguments`` are JSON), or a call of a custom tool (whose ``input``
    is text)."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[OutputText] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """``reasoning_tokens`` counts the tokens of thoughts and of the marks around them."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """The reason why a text was cut off. After a timeout, ``stop_reason`` is ``deadline``."""

    reason: str
    stop_reason: str | None = None


class ResponsesError(BaseModel):
    code: str
    message: str


class ResponsesAnswer(BaseModel):
    """A response. ``status`` is ``in_progress``, ``completed``, ``incomplete`` or ``failed``. Most
    fields echo the request."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponsesUsage | None = None
    metrics: ResponseMetrics | None = None
    ignored_keywords: list[str] | None = None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class ResponsesEvent(BaseModel):
    """An event of a stream. Its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
