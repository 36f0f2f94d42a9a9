"""``POST /v1/chat/completions``."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.runtime.batch.request import TokenOutput
from eesd.runtime.llm import LLM
from eesd.serve.answers import Head, finished, serving_of
from eesd.serve.errors import ANSWERS, APIError
from eesd.serve.generations import Generations, Progress
from eesd.serve.json_route import JSONRoute
from eesd.serve.logprobs import TokenWriter
from eesd.serve.options import Serving
from eesd.serve.params import check_model, requests_of
from eesd.serve.schemas import (
    ChatAnswer,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    Delta,
)
from eesd.serve.streaming import DONE, Events, event, event_stream, json_response, unless_left

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=ANSWERS)
async def chat_completions(body: ChatBody, request: Request, serving: Annotated[Serving, Depends(serving_of)]) -> Response:
    """Answer chat messages."""
    check_model(body.model, serving)
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs; set it to true.", "top_logprobs", "invalid_value")
    tokens = await run_in_threadpool(_encode, body, serving.service.llm)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    generations = Generations(serving, requests_of(body, [tokens], serving, most, logprobs))
    request.state.generations = generations
    writers = [_Writer(body, serving, choice) for choice in generations.progress]
    if body.stream:
        head = Head.new("chatcmpl", "chat.completion.chunk", serving)
        return await event_stream(_chunks(body, head, generations, writers), serving.options.send_timeout)
    head = Head.new("chatcmpl", "chat.completion", serving)
    return json_response(await unless_left(request, _whole(body, head, generations, writers)))


def _encode(body: ChatBody, llm: LLM) -> list[int]:
    """The messages as tokens. A template is a program and may take long, so it runs in a thread."""
    return llm.encode([message.given() for message in body.messages])


class _Writer:
    """Makes the parts of one choice."""

    def __init__(self, body: ChatBody, serving: Serving, progress: Progress) -> None:
        self._body, self._progress = body, progress
        self._tokens = TokenWriter(serving.codec, progress.request.tokens) if body.logprobs else None

    def logprobs(self, outputs: Sequence[TokenOutput]) -> ChatLogprobs | None:
        return self._tokens.chat(outputs) if self._tokens else None

    def message(self, index: int) -> ChatChoice:
        """The whole choice."""
        progress = self._progress
        message = ChatMessage(role="assistant", content="".join(progress.text))
        choice = ChatChoice(index=index, message=message, logprobs=self.logprobs(progress.outputs), **finished(progress))
        if self._body.return_token_ids:
            choice.token_ids = [output.token for output in progress.outputs]
            choice.prompt_token_ids = list(progress.request.tokens)
        return choice

    def deltas(self, index: int, text: str, outputs: Sequence[TokenOutput]) -> list[ChatChunkChoice]:
        """What an update adds to the choice, and its end."""
        choices = []
        if text or (outputs and (self._tokens or self._body.return_token_ids)):
            choice = ChatChunkChoice(index=index, delta=Delta(content=text), finish_reason=None)
            if self._tokens:
                choice.logprobs = self.logprobs(outputs)
            if self._body.return_token_ids:
                choice.token_ids = [output.token for output in outputs]
            choices.append(choice)
        if self._progress.finish_reason:
            choices.append(ChatChunkChoice(index=index, delta=Delta(), **finished(self._progress)))
        return choices


async def _whole(body: ChatBody, head: Head, generations: Generations, writers: Sequence[_Writer]) -> ChatAnswer:
    async with generations:
        async for index, update in generations:
            generations.progress[index].see(update)
    # In a thread: the log-probabilities of many tokens take long to write.
    choices = [await run_in_threadpool(writer.message, index) for index, writer in enumerate(writers)]
    usage, metrics = generations.usage(body.choices), generations.metrics()
    return ChatAnswer(**head.fields, choices=choices, usage=usage, metrics=metrics)


async def _chunks(body: ChatBody, head: Head, generations: Generations, writers: Sequence[_Writer]) -> Events:
    left = len(writers)
    async with generations:
        for index in range(left):
            role = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""), finish_reason=None)
            yield event(ChatChunk(**head.fields, choices=[role]))
        async for index, update in generations:
            text = generations.progress[index].see(update)
            left -= update.finish_reason is not None
            for choice in writers[index].deltas(index, text, update.tokens):
                chunk = ChatChunk(**head.fields, choices=[choice])
                if not left and choice.finish_reason and not body.include_usage:
                    chunk.metrics = generations.metrics()
                yield event(chunk)
    if body.include_usage:
        usage, metrics = generations.usage(body.choices), generations.metrics()
        yield event(ChatChunk(**head.fields, choices=[], usage=usage, metrics=metrics))
    yield DONE
