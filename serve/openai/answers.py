"""Answer completions and chats. An answer is sent whole or as a stream of chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from time import time
from typing import Any, Protocol
from uuid import uuid4

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.runtime.request import Update
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import DONE, Events, EventStream, event, json_response, unless_left
from eesd.serve.openai.generations import Generations, Progress
from eesd.serve.openai.schemas import Answer, Choice, GenerationBody


class Writer(Protocol):
    """Builds one choice."""

    def see(self, update: Update) -> object:
        """Process an update of a choice that is returned whole."""
        ...

    def choice(self) -> Choice:
        """Return the whole choice. This is called after the last update."""
        ...

    def chunks(self, update: Update) -> Sequence[Choice]:
        """Process an update of a stream. Return the parts that it adds to the choice. The last part
        of a choice has a finish reason."""
        ...


def new_answer(
    model: type[Answer], kind: str, prefix: str, serving: Serving, generations: Generations
) -> Callable[..., Answer]:
    """Return a function that makes an answer or a chunk of an answer. Its ``object`` is ``kind``,
    and its id begins with ``prefix``."""
    generations.id = f"{prefix}-{uuid4().hex}"
    return partial(
        model,
        id=generations.id,
        object=kind,
        created=int(time()),
        model=serving.model_name,
    )


def finished(progress: Progress) -> dict[str, Any]:
    """Return the finish reason of a choice, which is None while it runs. At the end, the stop
    reason is returned as well."""
    found = {"finish_reason": progress.finish_reason}
    if progress.finish_reason:
        found["stop_reason"] = progress.stop_reason
    return found


async def respond(
    body: GenerationBody,
    request: Request,
    generations: Generations,
    writers: Sequence[Writer],
    new: Callable[..., Answer],
    first: Sequence[Choice] = (),
) -> Response:
    """Run the generations and answer with their choices.

    Args:
        body: The body of the request.
        request: The HTTP request.
        generations: The generations to run.
        writers: A writer for each choice.
        new: Function made by :func:`new_answer`.
        first: The first choices of a stream. They are sent as soon as the requests have been
            accepted.
    """
    if body.stream:
        return EventStream(_chunks(body, generations, writers, new, first))
    return json_response(await unless_left(request, _whole(generations, writers, new)))


async def _whole(
    generations: Generations,
    writers: Sequence[Writer],
    new: Callable[..., Answer],
) -> Answer:
    async with generations:
        async for index, update in generations:
            writers[index].see(update)
    # In a thread, because the log-probabilities of many tokens take long to write.
    choices = [await run_in_threadpool(writer.choice) for writer in writers]
    return new(choices=choices, usage=generations.usage(), **generations.extras())


async def _chunks(
    body: GenerationBody,
    generations: Generations,
    writers: Sequence[Writer],
    new: Callable[..., Answer],
    first: Sequence[Choice],
) -> Events:
    """Yield a chunk for each part of a choice, then a usage chunk if the client asked for one, and
    finally the end mark. The last chunk has the drafting metrics."""
    async with generations:
        for choice in first:
            yield event(new(choices=[choice]))
        async for index, update in generations:
            part = partial(writers[index].chunks, update)
            for choice in await run_in_threadpool(part) if update.prompt_logprobs else part():
                last = (
                    choice.finish_reason is not None
                    and generations.ended
                    and not body.include_usage
                )
                yield event(new(choices=[choice], **(generations.extras() if last else {})))
    if body.include_usage:
        yield event(new(choices=[], usage=generations.usage(), **generations.extras()))
    yield DONE
