"""What answers of both kinds begin with, how their choices end, and how they are streamed."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any
from uuid import uuid4

from eesd.runtime.request import Update
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import DONE, Events, event
from eesd.serve.openai.generations import Generations, Progress
from eesd.serve.openai.schemas import Answer, Choice, GenerationBody


@dataclass(frozen=True)
class Head:
    """The fields that an answer, and each of its chunks, begins with."""

    fields: dict[str, Any]

    @classmethod
    def new(cls, prefix: str, kind: str, serving: Serving) -> "Head":
        """A head with an id of its own.

        Args:
            prefix: The id begins with it.
            kind: The ``object`` of the answer.
            serving: The server.
        """
        name = serving.model_name
        return cls({"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time()), "model": name})


def finished(progress: Progress) -> dict[str, Any]:
    """How a choice ended, so far not at all."""
    reason = {"stop_reason": progress.stop_reason} if progress.finish_reason else {}
    return {"finish_reason": progress.finish_reason, **reason}


async def chunks(
    body: GenerationBody,
    new: Callable[..., Answer],
    generations: Generations,
    parts: Callable[[int, Update], Awaitable[Sequence[Choice]]],
    first: Sequence[Choice] = (),
) -> Events:
    """The events of a stream: a chunk for each part of a choice, one for usage if it is wanted, and the end.

    The last chunk says what drafting did.

    Args:
        body: What is asked for.
        new: Makes a chunk from its ``choices``, and from ``usage`` and ``metrics`` in one that has them.
        generations: What comes.
        parts: What an update adds to the choice with this index; the last one has a finish reason.
        first: What comes before everything else, when the requests have been accepted.
    """
    async with generations:
        for choice in first:
            yield event(new(choices=[choice]))
        async for index, update in generations:
            for choice in await parts(index, update):
                last = choice.finish_reason is not None and generations.ended and not body.include_usage
                yield event(new(choices=[choice], **({"metrics": generations.metrics()} if last else {})))
    if body.include_usage:
        yield event(new(choices=[], usage=generations.usage(body.choices), metrics=generations.metrics()))
    yield DONE
