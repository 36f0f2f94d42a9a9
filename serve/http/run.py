"""The server process. It binds a socket, closes connections that stall in the middle of a request,
and lets running requests finish when it stops."""

import asyncio
import socket
import sys
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

if sys.platform != "win32":
    import resource

from eesd.common.errors import EESDError
from eesd.serve.http.observe import LOGGER
from eesd.serve.http.options import Serving

KEEP_SECONDS = 65
"""Seconds for which an idle connection is kept for the next request. Proxies and clients keep their
connections for a shorter time."""
UNREAD_BYTES = 64 << 10
"""Number of bytes of a stream that the system buffers. With a larger buffer, the server would
notice only after minutes that a client reads nothing."""
LAST_SECONDS = 5
"""After the remaining requests have been cancelled, their last responses must be written within
this number of seconds."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address without listening. Connections are therefore refused until the
    model is loaded. Port 0 chooses a free port.

    Raises:
        EESDError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this option.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        try:
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
        return bound
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EESDError(
            f"The server cannot listen on {host} port {port} ({reason}); give another "
            "--host or --port."
        ) from None


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish. A second signal ends them at
    once.

    Args:
        app: The application. Its service is closed at the end.
        bound: The socket that :func:`bind` returned. It is closed at the end.
    """
    _allow_many_connections()
    serving: Serving = app.state.serving
    config = uvicorn.Config(
        app,
        http=type("Protocol", (_PatientProtocol,), {"serving": serving}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    server = _Server(config, serving)
    try:
        server.run(sockets=[bound])
    finally:
        serving.service.close()


def _allow_many_connections() -> None:
    """Raise the limit of file descriptors, because each connection needs one. The usual limit of
    1024 exists only for old programs that use ``select``."""
    if sys.platform == "win32":
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class _Server(uvicorn.Server):
    """Stops in two steps. First it refuses new requests and fails the readiness probe. Then it ends
    as soon as the running requests have finished."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving
        self._deadline = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            LOGGER.info("Serving %s on %s", self._serving.model_name, address_of(bound))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._serving.draining:
            self.should_exit = True
        self._deadline = monotonic() + self._serving.options.drain_seconds
        self._serving.draining = True

    async def on_tick(self, counter: int) -> bool:
        over = self._serving.draining and (
            self._serving.active == 0 or monotonic() >= self._deadline
        )
        if over and self._serving.active:
            LOGGER.warning(
                "%d requests did not finish in time; they are cancelled.", self._serving.active
            )
            await asyncio.to_thread(self._serving.service.close)
        return await super().on_tick(counter) or over


class _PatientProtocol(H11Protocol):
    """Closes connections whose client never begins a request, does not complete a request's head,
    or leaves an answer unread. Waiting until the client reads the answer, or until a connection
    with unread data closes, could take for ever."""

    serving: Serving
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing pauses as soon as the system's buffer is full.
        transport.set_write_buffer_limits(0)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.serving.options.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        # Input that is not HTTP never reaches the application.
        self.serving.metrics.answered("other", "other", 400)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the timer for the head of a request whenever no request is being answered."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._head is None:
            self._head = self.loop.call_later(
                self.serving.options.body_timeout, self.transport.abort
            )
        elif not waiting and self._head:
            self._head.cancel()
            self._head = None
