"""``POST /v1/responses``: OpenAI's Responses API, built on chat completions. It has no memory."""

from collections.abc import Iterator
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from eesd.runtime.request import Update
from eesd.serve.grammar.tool_calls import ToolDelta, parsed
from eesd.serve.http.errors import ANSWERS, APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import (
    Events,
    EventStream,
    json_bytes,
    json_response,
    stream_error,
    unless_left,
)
from eesd.serve.openai.chat import Reader, begin
from eesd.serve.openai.generations import Generations
from eesd.serve.openai.logprobs import TokenWriter
from eesd.serve.openai.response_input import as_chat
from eesd.serve.openai.response_schemas import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputItem,
    OutputText,
    ResponsesAnswer,
    ResponsesBody,
    ResponsesError,
    ResponsesEvent,
    ResponsesUsage,
)
from eesd.serve.openai.schemas import ChatLogprob

router = APIRouter(route_class=JSONRoute)
Event = tuple[str, dict[str, Any]]
"""The type of an event and its fields. The sequence number is added later."""


@router.post("/v1/responses", response_model=ResponsesAnswer, responses=ANSWERS)
async def responses(body: ResponsesBody, request: Request, serving: Shared) -> Response:
    """Answer an input with function calls or text. Nothing is stored."""
    template = serving.codec.chat_template if serving.codec else None
    chat = as_chat(body, template is not None and "developer" in template.source)
    generations, (reader,) = await begin(chat, request, serving)
    tokens = TokenWriter(serving.codec, reader.progress.request.tokens) if chat.logprobs else None
    writer = _Writer(body, serving, generations, reader, tokens)
    if body.stream:
        return EventStream(_events(writer, generations))
    return json_response(await unless_left(request, _whole(writer, generations)))


async def _whole(writer: "_Writer", generations: Generations) -> ResponsesAnswer:
    async with generations:
        async for _, update in generations:
            for _event in writer.see(update):
                pass
    return writer.answer(writer.status)


async def _events(writer: "_Writer", generations: Generations) -> Events:
    """Yield the events of a stream. An error before the first event has an HTTP status. A later
    error adds two final events."""
    number = 0

    def numbered(events: Iterator[Event]) -> Iterator[bytes]:
        nonlocal number
        for kind, fields in events:
            data = json_bytes(ResponsesEvent(type=kind, sequence_number=number, **fields))
            number += 1
            yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    async with generations:
        for piece in numbered(writer.begin()):
            yield piece
        try:
            async for _, update in generations:
                for piece in numbered(writer.see(update)):
                    yield piece
        except Exception as error:  # the status has been sent
            for piece in numbered(writer.fail(stream_error(error))):
                yield piece
            return
    for piece in numbered(writer.end()):
        yield piece


class _Writer:
    """Builds the output of a response, and the events that stream it."""

    def __init__(
        self,
        body: ResponsesBody,
        serving: Serving,
        generations: Generations,
        reader: Reader,
        tokens: TokenWriter | None,
    ) -> None:
        self._body = body
        self._generations = generations
        self._reader = reader
        self._tokens = tokens
        self._id = generations.id = f"resp_{uuid4().hex}"
        self._created = int(time())
        self._model = serving.model_name
        self._items: list[OutputItem] = []
        self._pieces: list[str] = []
        """Pieces of the open item so far: its text or its arguments."""
        self._open = False
        self._logprobs: list[ChatLogprob] = []
        """Log-probabilities of the tokens of the open text. They include tokens whose text has not
        appeared yet."""
        self._told = 0
        self._custom = {
            tool.get("name") for tool in body.tools or () if tool.get("type") == "custom"
        }

    @property
    def status(self) -> str:
        return "incomplete" if self._reader.progress.finish_reason == "length" else "completed"

    def begin(self) -> Iterator[Event]:
        """Yield the first events, after the request has been accepted."""
        for kind in ("response.created", "response.in_progress"):
            yield kind, {"response": self.answer("in_progress")}

    def see(self, update: Update) -> Iterator[Event]:
        """Process an update. Yields the events that it adds, all of which must be consumed."""
        deltas = self._reader.see(update)
        if self._tokens:
            self._logprobs += self._tokens.chat(update.tokens).content
        for delta in deltas:
            yield from self._take(delta)
        if self._reader.progress.finish_reason:
            if not any(item.type != "reasoning" for item in self._items):
                yield from self._close(self.status)
                yield from self._begin_text()
            yield from self._close(self.status)

    def end(self) -> Iterator[Event]:
        """Yield the last event."""
        yield f"response.{self.status}", {"response": self.answer(self.status)}

    def fail(self, error: APIError) -> Iterator[Event]:
        """Yield the last events after an error."""
        yield (
            "error",
            {"code": error.code or "server_error", "message": error.message, "param": error.param},
        )
        code = "invalid_prompt" if error.status < 500 else "server_error"
        list(self._close("incomplete"))  # the open item
        answer = self.answer("failed")
        answer.error = ResponsesError(code=code, message=error.message)
        yield "response.failed", {"response": answer}

    def _take(self, delta: ToolDelta) -> Iterator[Event]:
        if delta.thought:
            if not self._open or self._items[-1].type != "reasoning":
                yield from self._close("completed")
                item = OutputItem(
                    id=f"rs_{uuid4().hex}",
                    type="reasoning",
                    status="in_progress",
                    summary=[],
                    content=[],
                )
                yield from self._begin(item)
            self._pieces.append(delta.thought)
            yield "response.reasoning_text.delta", {**self._place(0), "delta": delta.thought}
        if delta.content:
            if not self._open or self._items[-1].type != "message":
                yield from self._close("completed")
                yield from self._begin_text()
            self._pieces.append(delta.content)
            new = self._logprobs[self._told :]
            self._told = len(self._logprobs)
            yield (
                "response.output_text.delta",
                {**self._place(0), "delta": delta.content, "logprobs": new},
            )
        if delta.id:
            yield from self._close("completed")
            item = OutputItem(id=f"fc_{uuid4().hex}", type="function_call", status="in_progress")
            item.call_id = delta.id
            item.name = delta.name
            if delta.name in self._custom:
                item.type = "custom_tool_call"
                item.input = ""
            else:
                item.arguments = ""
            yield from self._begin(item)
        if delta.arguments:
            self._pieces.append(delta.arguments)
            if self._items[-1].type == "function_call":
                yield (
                    "response.function_call_arguments.delta",
                    {**self._place(), "delta": delta.arguments},
                )

    def _begin_text(self) -> Iterator[Event]:
        message = OutputItem(
            id=f"msg_{uuid4().hex}",
            type="message",
            status="in_progress",
            role="assistant",
            content=[],
        )
        yield from self._begin(message)
        yield "response.content_part.added", {**self._place(0), "part": _output_text("", [])}

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self._items.append(item)
        self._open = True
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": item}

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return
        item = self._items[-1]
        value = "".join(self._pieces)
        self._open = False
        self._pieces = []
        if item.type == "message":
            part = _output_text(value, self._logprobs)
            yield (
                "response.output_text.done",
                {**self._place(0), "text": value, "logprobs": part.logprobs},
            )
            yield "response.content_part.done", {**self._place(0), "part": part}
            item.content = [part]
            item.status = status
        elif item.type == "reasoning":
            yield "response.reasoning_text.done", {**self._place(0), "text": value}
            item.content = [OutputText(type="reasoning_text", text=value)]
            item.status = status
        elif item.type == "custom_tool_call":
            yield from self._close_custom(item, value)
        else:
            yield (
                "response.function_call_arguments.done",
                {**self._place(), "name": item.name, "arguments": value},
            )
            item.arguments = value
            item.status = "completed" if isinstance(parsed(value), dict) else "incomplete"
        self._logprobs = []
        self._told = 0
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _close_custom(self, item: OutputItem, arguments: str) -> Iterator[Event]:
        """Yield the events with the input of a custom tool call. The input is known when its JSON
        is complete."""
        item.status = "incomplete"
        if isinstance(call := parsed(arguments), dict):
            item.status = "completed"
            item.input = str(call.get("input", ""))
        kind = "response.custom_tool_call_input"
        yield f"{kind}.delta", {**self._place(), "delta": item.input}
        yield f"{kind}.done", {**self._place(), "input": item.input}

    def _place(self, content: int | None = None) -> dict[str, Any]:
        """Return the fields of an event that say where it belongs in the last item."""
        inside = {} if content is None else {"content_index": content}
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, **inside}

    def answer(self, status: str) -> ResponsesAnswer:
        """Return the response as it is so far."""
        body = self._body
        progress = self._reader.progress
        sampling = progress.request.sampling
        answer = ResponsesAnswer(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            model=self._model,
            output=[],
            error=None,
            incomplete_details=None,
            usage=None,
            background=False,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={
                "effort": body.reasoning and body.reasoning.effort,
                "summary": None,
            },
            store=False,
            temperature=sampling.temperature,
            text={
                "format": body.text.format.given()
                if body.text and body.text.format
                else {"type": "text"}
            },
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation="disabled",
            user=body.user,
        )
        if status == "incomplete":
            answer.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            if progress.stop_reason == "deadline":
                answer.incomplete_details.stop_reason = "deadline"
        if status != "in_progress":
            answer.output = self._items
            answer.usage = _usage(self._generations)
            for name, value in self._generations.extras().items():
                setattr(answer, name, value)
        return answer


def _output_text(text: str, logprobs: list[ChatLogprob]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)


def _usage(generations: Generations) -> ResponsesUsage:
    usage = generations.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(
            reasoning_tokens=generations.progress[0].thought_tokens
        ),
        total_tokens=usage.total_tokens,
    )
