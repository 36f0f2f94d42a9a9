"""The routes of the playground. It is a page that shows the source of each token, the rejected
drafts, and the speed-up.

The page is six files without a build step. It loads nothing from other hosts, and its
Content-Security-Policy enforces that.
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
from eesd.controllers.calibration import CalibratedDraft, Calibrator
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.decoding.drafting import Drafting
from eesd.runtime.request import Update
from eesd.serve.http.errors import APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import Events, EventStream, event
from eesd.serve.openai.generations import Generations
from eesd.serve.openai.logprobs import TokenWriter
from eesd.serve.openai.params import requests_of
from eesd.serve.openai.schemas import GenerationBody, Logprobs, Message

PAGE = Path(__file__).parent
SCRIPTS = ("app.js", "answer.js", "figures.js", "stream.js", "style.css")
FILES = {"/": "index.html"} | {f"/playground/{name}": name for name in SCRIPTS}
"""Paths of the page. They need no API key: the page asks the user for the key, and sends it with
its requests."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LEARNED_SECONDS = 0.25
"""Minimum seconds between two events that have the controller's estimates."""

router = APIRouter(route_class=JSONRoute, include_in_schema=False)


class PlayBody(GenerationBody):
    """The body of a request from the page. It asks for an answer to ``messages``, or for the text
    that follows ``prompt``."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 256
    logprobs: Logprobs | None = None


class About(BaseModel):
    """Facts about the server that the page shows in its header and uses in its form."""

    model: str
    version: str
    chat: bool
    drafts: bool
    max_model_len: int
    sampling: dict[str, float]


class PlayToken(BaseModel):
    """A new token. If the request asks for it, the token has its log-probability and the tokens
    that were most likely in its place, best first."""

    id: int
    text: str
    source: str
    logprob: float | None = None
    top: list[tuple[str, float]] = []


class PlayEvent(BaseModel):
    """The result of one round. ``rejected`` has the draft tokens that the verifier's token
    replaced. The verifier's token is the last of ``tokens``."""

    tokens: list[PlayToken]
    rejected: list[str]
    held: str
    finish_reason: str | None
    cached_tokens: int
    stats: dict[str, Any]
    learned: dict[str, Any] | None = None


@router.get("/playground/about")
async def about(serving: Shared) -> About:
    """Describe the server."""
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
    """Generate, and stream one event for each round."""
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "Give either prompt or messages.")
    if body.choices > 1:
        raise APIError(400, "The playground shows only one text; leave n out.", "n")
    tokens = await run_in_threadpool(_encode, body, serving)
    requests = requests_of(body, [tokens], serving, body.max_tokens, body.logprobs)
    generations = Generations(serving, requests)
    request.state.generations = generations
    return EventStream(_events(generations, serving, TokenWriter(serving.codec, tokens)))


def _encode(body: PlayBody, serving: Serving) -> list[int]:
    prompt = (
        body.prompt if body.messages is None else [message.given() for message in body.messages]
    )
    tokens = serving.service.llm.encode(prompt or "")
    if not tokens:
        raise APIError(400, "The prompt is empty; enter some text.", "prompt")
    return tokens


async def _events(generations: Generations, serving: Serving, writer: TokenWriter) -> Events:
    told = -LEARNED_SECONDS
    async with generations:
        async for index, update in generations:
            generations.progress[index].see(update)
            learned = None
            if update.finish_reason or monotonic() - told >= LEARNED_SECONDS:
                told = monotonic()
                learned = estimates(serving.service.deciding)
            yield event(_event(update, learned, serving, writer))


def estimates(deciding: Drafting | LoadRule) -> dict[str, Any]:
    """Return the estimates of the rule that decided the last round, as JSON values.

    Returns:
        A dictionary. ``accept`` has the mean and the covariance of the calibrator for the exit
        head's drafts, and ``text`` has those of the calibrator for drafts from the text. Both are
        left out if the rule has no such calibrator. ``alone`` says whether the request ran alone.
        If it did and the time is known, ``plain_seconds`` has the seconds of a plain round.
    """
    if isinstance(deciding, LoadRule):
        return {"alone": False, "accept": _state(deciding.accept), "text": _state(deciding.text)}
    found: dict[str, Any] = {"alone": True}
    if deciding.guard is not None and deciding.guard.plain_step:
        found["plain_seconds"] = deciding.guard.plain_step
    if deciding.drafter is not None and isinstance(deciding.drafter.controller, CalibratedDraft):
        found["accept"] = _state(deciding.drafter.controller.accept)
    if deciding.text is not None:
        found["text"] = _state(deciding.text.accept)
    return found


def _state(calibrator: Calibrator) -> dict[str, list[float]]:
    return {"mean": calibrator.mean, "covariance": calibrator.covariance}


def _event(
    update: Update, learned: dict[str, Any] | None, serving: Serving, writer: TokenWriter
) -> PlayEvent:
    tokens = [
        PlayToken(id=token.token, text=token.text, source=token.source) for token in update.tokens
    ]
    for token, found in zip(tokens, writer.chat(update.tokens).content, strict=False):
        token.logprob = found.logprob
        token.top = [(other.token, other.logprob) for other in found.top_logprobs]
    return PlayEvent(
        tokens=tokens,
        rejected=_texts(update.rejected, serving),
        held=update.held,
        finish_reason=update.finish_reason,
        cached_tokens=update.cached_tokens,
        stats=update.stats.to_dict(),
        learned=learned,
    )


def _texts(tokens: Sequence[int], serving: Serving) -> list[str]:
    """Return the text of each token. A special token has its name as text."""
    codec = serving.codec
    if codec is None:
        return [str(token) for token in tokens]
    return [codec.decode([token]) or str(codec.tokenizer.id_to_token(token)) for token in tokens]


def mount_page(app: FastAPI) -> None:
    """Add the page, at ``/``, and its routes to an app of :func:`~eesd.serve.app.make_app`."""
    for path, name in FILES.items():
        app.add_api_route(path, _file(name), include_in_schema=False)
    app.include_router(router)


def _file(name: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return FileResponse(PAGE / name, headers=HEADERS)

    return file
