"""Who may come in, and how much they may bring: API keys, the size and the pace of bodies, and nobody new while stopping."""

import asyncio
import hmac
from collections.abc import Collection
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd.serve.http.errors import APIError
from eesd.serve.http.observe import QUIET
from eesd.serve.http.options import Serving

LINGER = 8
"""A body that is too large is read up to so many times the limit, so that the client sees the answer and not a reset."""
CLOSE = {"Connection": "close"}


class Gate:
    """ASGI middleware in front of the routes. A body is read whole before its route is entered.

    Args:
        app: The routes.
        serving: What they share.
        open_paths: Paths that need no API key.
    """

    def __init__(self, app: ASGIApp, serving: Serving, open_paths: Collection[str]) -> None:
        self._app, self._serving, self._open = app, serving, open_paths
        self._keys = [sha256(key.encode()).digest() for key in serving.options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        quiet = scope["path"] in QUIET
        self._serving.active += not quiet
        try:
            try:
                body = await self._admit(scope, receive)
            except APIError as error:
                await error.response(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._serving.active -= not quiet

    async def _admit(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of a request that may enter; None if the client left before it was complete.

        Raises:
            APIError: It may not enter.
        """
        headers, options = Headers(scope=scope), self._serving.options
        host = headers.get("host")  # HTTP/1.0 has none: probes of load balancers use it, browsers do not
        if options.allowed_hosts and host is not None and _name_of(host) not in options.allowed_hosts:
            names = ", ".join(options.allowed_hosts)
            message = f"The request is for another host; this server answers for {names}. --allowed-host adds one."
            raise APIError(400, message, code="unknown_host", headers=CLOSE)
        key = self._key(headers.get("authorization", ""))
        scope.setdefault("state", {})["key"] = key
        if self._keys and scope["path"] not in self._open and not key:
            message = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            raise APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer", **CLOSE})
        if self._serving.draining and scope["path"] not in QUIET:
            raise APIError(503, "The server is stopping; ask another one.", code="stopping", headers=CLOSE)
        try:
            async with asyncio.timeout(options.body_timeout):
                return await _read(headers, receive, options.max_body_bytes)
        except TimeoutError:
            message = f"The body did not come within {options.body_timeout:g} seconds; send it faster."
            raise APIError(408, message, code="timeout", headers=CLOSE) from None

    def _key(self, authorization: str) -> str:
        """What the log calls the key of a header: the beginning of its SHA-256. Empty if it is none of the keys.

        Takes the same time for every wrong key.
        """
        kind, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return digest.hex()[:8] if any(matches) and kind.lower() == "bearer" else ""


def _name_of(host: str) -> str:
    """The name in a Host header, without a port; "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _read(headers: Headers, receive: Receive, most: int) -> bytes | None:
    """The whole body; None if the client left. Raises :class:`APIError` if it has more than ``most`` bytes."""
    declared = headers.get("content-length", "")
    pieces, size = [], 0
    if not (declared.isascii() and declared.isdigit() and int(declared[:19]) > LINGER * most):
        while size <= LINGER * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= most:
                pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                if size <= most:
                    return b"".join(pieces)
                break
    wanted = f"send at most {most} bytes"
    raise APIError(413, f"The body is too large; {wanted}.", code="body_too_large", headers=CLOSE)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body first."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
