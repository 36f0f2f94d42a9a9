"""Server-sent events. If a client leaves, its request is cancelled."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from eesd.serve.http.errors import APIError, ClientLeftError, as_api_error
from eesd.serve.http.observe import LOGGER

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""A comment. Clients ignore comments, but without them proxies would close a connection after a
long silence."""
QUIET_SECONDS = 10.0
"""Seconds without an event before a comment is sent."""


def json_bytes(value: BaseModel) -> bytes:
    """Return a response as JSON. Fields that were not set are left out."""
    return value.model_dump_json(exclude_unset=True).encode(errors="replace")


def json_response(value: BaseModel) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def event(value: BaseModel) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def stream_error(error: Exception) -> APIError:
    """Return the error for a client whose stream failed after the status was sent. Server errors
    are logged."""
    api_error = as_api_error(error)
    if api_error.status == 500:
        LOGGER.error("A stream failed.", exc_info=error)
    return api_error


class EventStream(Response):
    """A response that sends events as soon as they are ready.

    An exception before the first event becomes an error with a status. After that the status has
    been sent, so an error becomes the last event: ``data: {"error": ...}`` without ``[DONE]``.
    While there are no events, comments are sent. The first comment is sent together with the
    status.

    Args:
        events: The events. The iterator is closed at the end, even if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_left(self._send(send), receive)
        except ClientLeftError:  # the status may have been sent; the log and the metrics show 499
            scope.setdefault("state", {})["left"] = True
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async with aclosing(_with_comments(self._events)) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:  # the status has been sent
                last = b"data: " + stream_error(error).body + b"\n\n"
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _with_comments(events: Events) -> Events:
    """Yield the events, and yield a comment whenever there has been no event for
    :data:`QUIET_SECONDS`."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({waiting}, timeout=QUIET_SECONDS)
            if not waiting.done():
                yield COMMENT
                continue
            if (piece := waiting.result()) is None:
                return
            yield piece
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await waiting


async def unless_left(request: Request, work: Coroutine[None, None, T]) -> T:
    """Do the work and return its result. If the client closes the connection first, the work is
    cancelled and :class:`ClientLeftError` is raised."""
    return await _unless_left(work, request.receive)


async def _unless_left(work: Coroutine[None, None, T], receive: Receive) -> T:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientLeftError
    finally:
        for task in (doing, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await doing
        with suppress(asyncio.CancelledError, Exception):
            await leaving
