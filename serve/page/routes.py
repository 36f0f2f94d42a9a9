"""The playground: a page that shows who proposed each token, what was rejected, and what drafting
is worth.

The page is six files without a build step. Nothing comes from elsewhere, and its
Content-Security-Policy says so.
"""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, Field

import eesd
from eesd.runtime.request import Update
from eesd.serve.http.errors import APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import Events, EventStream, event
from eesd.serve.openai.generations import Generations
from eesd.serve.openai.params import requests_of
from eesd.serve.openai.schemas import GenerationBody, Message

PAGE = Path(__file__).parent
SCRIPTS = ("app.js", "answer.js", "figures.js", "stream.js", "style.css")
FILES = {"/": "index.html"} | {f"/playground/{name}": name for name in SCRIPTS}
"""Paths of the page, which need no API key: it has nothing to hide, and asks for the key itself."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src "
    "data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LEARNED_SECONDS = 0.25
"""How often the page is told what was learned about drafting."""

router = APIRouter(route_class=JSONRoute, include_in_schema=False)


class PlayBody(GenerationBody):
    """What the page asks for: an answer to ``messages``, or what follows ``prompt``."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256


class About(BaseModel):
    """What the page shows of the server."""

    model: str
    version: str
    chat: bool
    drafts: bool
    max_model_len: int
    sampling: dict[str, float]


class PlayToken(BaseModel):
    id: int
    text: str
    source: str


class PlayEvent(BaseModel):
    """One update. ``tokens`` come in their order; ``rejected`` was drafted in the place of the last
    one of the verifier."""

    tokens: list[PlayToken]
    rejected: list[str]
    held: str
    finish_reason: str | None
    cached_tokens: int
    stats: dict[str, Any]
    learned: dict[str, Any] | None = None


@router.get("/playground/about")
async def about(serving: Shared) -> About:
    """What the page shows of the server."""
    llm = serving.service.llm
    codec = serving.codec
    sampling = llm.default_sampling
    return About(
        model=serving.model_name,
        version=eesd.__version__,
        chat=codec is not None and codec.chat_template is not None,
        drafts=llm.speculation is not None,
        max_model_len=serving.max_model_len,
        sampling={"temperature": sampling.temperature, "top_p": sampling.top_p},
    )


@router.post("/playground/generate")
async def generate(body: PlayBody, request: Request, serving: Shared) -> Response:
    """Generate, and stream one event for each update."""
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "There is no prompt, or there are two; give prompt or messages.")
    if body.choices > 1:
        raise APIError(400, "The playground shows one text; leave n out.", "n")
    tokens = await run_in_threadpool(_encode, body, serving)
    generations = Generations(serving, requests_of(body, [tokens], serving, body.max_tokens, None))
    request.state.generations = generations
    return EventStream(_events(generations, serving))


def _encode(body: PlayBody, serving: Serving) -> list[int]:
    prompt = (
        body.prompt if body.messages is None else [message.given() for message in body.messages]
    )
    tokens = serving.service.llm.encode(prompt or "")
    if not tokens:
        raise APIError(400, "The prompt is empty; write something.", "prompt")
    return tokens


async def _events(generations: Generations, serving: Serving) -> Events:
    told = -LEARNED_SECONDS
    async with generations:
        async for index, update in generations:
            generations.progress[index].see(update)
            learned = None
            if update.finish_reason or monotonic() - told >= LEARNED_SECONDS:
                told = monotonic()
                learned = serving.service.beliefs()
            yield event(_event(update, learned, serving))


def _event(update: Update, learned: dict[str, Any] | None, serving: Serving) -> PlayEvent:
    return PlayEvent(
        tokens=[
            PlayToken(id=token.token, text=token.text, source=token.source)
            for token in update.tokens
        ],
        rejected=_texts(update.rejected, serving),
        held=update.held,
        finish_reason=update.finish_reason,
        cached_tokens=update.cached_tokens,
        stats=update.stats.to_dict(),
        learned=learned,
    )


def _texts(tokens: Sequence[int], serving: Serving) -> list[str]:
    """Each token as text for people: its own name where it has none."""
    codec = serving.codec
    if codec is None:
        return [str(token) for token in tokens]
    return [codec.decode([token]) or str(codec.tokenizer.id_to_token(token)) for token in tokens]


def mount_page(app: FastAPI) -> None:
    """Serve the page at ``/``, and what it asks for, on an app of
    :func:`~eesd.serve.app.make_app`."""
    for path, name in FILES.items():
        app.add_api_route(path, _file(name), include_in_schema=False)
    app.include_router(router)


def _file(name: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return FileResponse(PAGE / name, headers=HEADERS)

    return file
