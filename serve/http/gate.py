"""Admission of requests. Before a request reaches its route, this module checks its API key, its
host name, and the size and the pace of its body. While the server stops, requests are refused."""

import asyncio
import hmac
from collections.abc import Collection
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd.common.checks import shown
from eesd.serve.http.errors import APIError, path_of
from eesd.serve.http.observe import QUIET
from eesd.serve.http.options import Serving

LINGER = 8
"""A body that is too large is read up to this multiple of the limit, so that the client receives
the error instead of a reset connection."""
CLOSE = {"Connection": "close"}


class Gate:
    """ASGI middleware in front of the routes. It reads the whole body before the route is entered.

    Args:
        app: The routes.
        serving: The state that the routes share.
        open_paths: Paths that need no API key.
    """

    def __init__(self, app: ASGIApp, serving: Serving, open_paths: Collection[str]) -> None:
        self._app = app
        self._serving = serving
        self._open = open_paths
        self._keys = [sha256(key.encode()).digest() for key in serving.options.api_keys]
        self._hosts = {host.lower() for host in serving.options.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # monitors send it; it is answered like GET, without the body
            scope = {**scope, "method": "GET"}
        quiet = path_of(scope) in QUIET
        self._serving.active += not quiet
        try:
            try:
                body = await self._admit(scope, receive)
            except APIError as error:
                await error.response_for(scope)(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._serving.active -= not quiet

    async def _admit(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body of an admitted request, or None if the client left before the body was
        complete.

        Raises:
            APIError: The request is not admitted.
        """
        headers = Headers(scope=scope)
        options = self._serving.options
        path = path_of(scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that reads one header and a server that reads the other would see different
            # requests (RFC 9112, 6.1).
            message = "The request has both Content-Length and Transfer-Encoding; send one of them."
            raise APIError(400, message, code="ambiguous_length", headers=CLOSE)
        key = self._key(headers)
        scope.setdefault("state", {})["key"] = key
        # HTTP/1.0 has no Host header. Load balancers use HTTP/1.0 for probes, but browsers do not
        # use it.
        host = headers.get("host")
        if (
            self._hosts
            and host is not None
            and _name_of(host) not in self._hosts
            and not self._any_host(path, key)
        ):
            names = ", ".join(options.allowed_hosts)
            message = (
                f"The request is for another host; this server answers for {names}. "
                "--allowed-host adds one."
            )
            raise APIError(400, message, code="unknown_host", headers=CLOSE)
        if self._keys and path not in self._open and not key:
            message = (
                "The API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "x-api-key: KEY."
            )
            raise APIError(
                401,
                message,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer", **CLOSE},
            )
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            message = (
                f"The body has the coding {shown(coding)}, which this server does not read; send "
                "it as it is, without Content-Encoding."
            )
            raise APIError(415, message, code="unsupported_coding", headers=CLOSE)
        if self._serving.draining and path not in QUIET:
            raise APIError(
                503,
                "The server is stopping; send the request to another server.",
                code="stopping",
                headers=CLOSE,
            )
        try:
            async with asyncio.timeout(options.body_timeout):
                return await _read(headers, receive, options.max_body_bytes)
        except TimeoutError:
            message = (
                f"The body did not come within {options.body_timeout:g} seconds; send it faster."
            )
            raise APIError(408, message, code="timeout", headers=CLOSE) from None

    def _any_host(self, path: str, key: str) -> bool:
        """Return whether a path is served for every host name. Kubernetes and Prometheus use an
        address instead of a name, and the answer reveals nothing to another site's page."""
        return path in ("/health", "/ready") or (
            path == "/metrics" and (bool(key) or self._serving.options.metrics_open)
        )

    def _key(self, headers: Headers) -> str:
        """Return the name that a request's key has in the log, which is the beginning of the key's
        SHA-256. The name is empty if the key is not valid.

        The check takes the same time for every wrong key.
        """
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [sha256(one.encode()).digest() for one in given]
        found = [
            digest
            for digest in digests
            for known in self._keys
            if hmac.compare_digest(digest, known)
        ]
        return found[0].hex()[:8] if found else ""


def _name_of(host: str) -> str:
    """Return the name in a Host header without its port, or "" if there is no such header."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _read(headers: Headers, receive: Receive, most: int) -> bytes | None:
    """Return the whole body, or None if the client left. Raises :class:`APIError` if it has more
    than ``most`` bytes."""
    declared = headers.get("content-length", "")
    pieces = []
    size = 0
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
    """Return a ``receive`` that delivers the body first."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
