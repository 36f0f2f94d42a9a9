"""``POST /v1/messages``: Anthropic's Messages API, built on chat completions."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.runtime.request import Update
from eesd.serve.anthropic.input import as_chat, check_edits
from eesd.serve.anthropic.schemas import (
    AnswerBlock,
    Count,
    CountBody,
    MessageAnswer,
    MessageEvent,
    MessagesBody,
    MessageUsage,
)
from eesd.serve.grammar.tool_calls import ToolDelta
from eesd.serve.http.errors import ANSWERS, ERRORS
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
from eesd.serve.openai.chat import Reader, begin, encode
from eesd.serve.openai.generations import Generations
from eesd.serve.openai.params import check_model

router = APIRouter(route_class=JSONRoute)
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


@router.post("/v1/messages", response_model=MessageAnswer, responses=ANSWERS)
async def messages(body: MessagesBody, request: Request, serving: Shared) -> Response:
    """Answer messages with thoughts, text and tool uses."""
    generations, (reader,) = await begin(as_chat(body), request, serving)
    check_edits(body, len(reader.progress.request.tokens))
    writer = _Writer(serving, generations, reader)
    if body.stream:
        return EventStream(_events(writer, generations))
    return json_response(await unless_left(request, _whole(writer, generations)))


@router.post("/v1/messages/count_tokens", responses=ERRORS)
async def count_tokens(body: CountBody, serving: Shared) -> Count:
    """Return the number of tokens in the prompt that the messages become."""
    check_model(body.model, serving)
    _, tokens = await run_in_threadpool(encode, as_chat(body), serving.service.llm.codec)
    return Count(input_tokens=len(tokens))


async def _whole(writer: "_Writer", generations: Generations) -> MessageAnswer:
    async with generations:
        async for _, update in generations:
            for _event in writer.see(update):
                pass
    return writer.answer()


async def _events(writer: "_Writer", generations: Generations) -> Events:
    """Yield the events of a stream. An error before the first event has an HTTP status. A later
    error becomes the last event."""
    async with generations:
        yield _event("message_start", message=writer.answer())
        try:
            async for _, update in generations:
                for kind, fields in writer.see(update):
                    yield _event(kind, **fields)
        except Exception as error:  # the status has been sent
            api_error = stream_error(error)
            yield _event("error", error={"type": api_error.type, "message": api_error.message})
            return
    answer = writer.answer()
    end = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
    yield _event("message_delta", delta=end, usage=answer.usage, **generations.extras())
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return (
        f"event: {kind}\ndata: ".encode() + json_bytes(MessageEvent(type=kind, **fields)) + b"\n\n"
    )


class _Writer:
    """Makes the blocks of an answer, and the events that stream them."""

    def __init__(self, serving: Serving, generations: Generations, reader: Reader) -> None:
        self._generations = generations
        self._reader = reader
        self._id = generations.id = f"msg_{uuid4().hex}"
        self._model = serving.model_name
        self._blocks: list[AnswerBlock] = []
        self._pieces: list[str] = []
        """Pieces of text of the open block so far."""
        self._open = False

    def see(self, update: Update) -> Iterator[tuple[str, dict[str, Any]]]:
        """Process an update. Yields the events that it adds, all of which must be consumed."""
        for delta in self._reader.see(update):
            yield from self._take(delta)
        if self._reader.progress.finish_reason:
            yield from self._close()

    def _take(self, delta: ToolDelta) -> Iterator[tuple[str, dict[str, Any]]]:
        if delta.thought:
            yield from self._add(
                "thinking", delta.thought, {"type": "thinking_delta", "thinking": delta.thought}
            )
        if delta.content:
            yield from self._add(
                "text", delta.content, {"type": "text_delta", "text": delta.content}
            )
        if delta.id:
            yield from self._begin(
                AnswerBlock(type="tool_use", id=delta.id, name=delta.name, input={})
            )
        if delta.arguments:
            yield from self._add(
                "tool_use",
                delta.arguments,
                {"type": "input_json_delta", "partial_json": delta.arguments},
            )

    def _add(
        self, kind: str, piece: str, delta: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._open or self._blocks[-1].type != kind:
            new = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
            yield from self._begin(AnswerBlock.model_validate({"type": kind, **new}))
        self._pieces.append(piece)
        yield "content_block_delta", {"index": len(self._blocks) - 1, "delta": delta}

    def _begin(self, block: AnswerBlock) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        yield "content_block_start", {"index": len(self._blocks) - 1, "content_block": block}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """End the open block, if there is one."""
        if not self._open:
            return
        block = self._blocks[-1]
        value = "".join(self._pieces)
        self._open = False
        self._pieces = []
        if block.type == "text":
            block.text = value
        elif block.type == "thinking":
            block.thinking = value
        else:
            block.input = _object(value)
        yield "content_block_stop", {"index": len(self._blocks) - 1}

    def answer(self) -> MessageAnswer:
        """Return the answer as it is so far."""
        progress = self._reader.progress
        usage = self._generations.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        answer = MessageAnswer(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=self._blocks,
            stop_reason=REASONS.get(progress.finish_reason or ""),
            stop_sequence=None,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - cached,
                output_tokens=usage.completion_tokens,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=cached,
            ),
        )
        if progress.finish_reason == "stop" and progress.stop_reason:
            answer.stop_reason = "stop_sequence"
            answer.stop_sequence = progress.stop_reason
        if progress.finish_reason:
            for name, value in self._generations.extras().items():
                setattr(answer, name, value)
        return answer


def _object(text: str) -> dict[str, Any]:
    """Return the input of a call. It is empty if the call was cut off, which ``stop_reason``
    shows."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
