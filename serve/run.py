"""The server as a process: one socket, connections that may not idle in mid-request, and a stop that lets requests finish."""

import asyncio
import resource
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from eesd.common.errors import EESDError
from eesd.serve.observe import LOGGER
from eesd.serve.options import Serving

SAVE_SECONDS = 300.0
"""How often what the controllers learned is saved."""
LAST_SECONDS = 5
"""Time for the last responses to be written, after the requests that took too long were cancelled."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Port 0 takes a free one.

    Raises:
        EESDError: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EESDError(f"{host} port {port} cannot be listened on ({reason}); give another --host or --port.") from None


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, listening: socket.socket, save: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish; a second signal ends them.

    Args:
        app: The application. Its service is closed at the end.
        listening: From :func:`listen`; closed at the end.
        save: Saves what the controllers learned. Called every few minutes and at the end, never twice at once.
    """
    _allow_many_connections()
    serving: Serving = app.state.serving
    head_timeout = serving.options.body_timeout

    class Protocol(_PatientProtocol):
        seconds = head_timeout

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    server = _Server(config, serving, save)
    try:
        server.run(sockets=[listening])
    finally:
        serving.service.close()
        save()
        if app.state.tracer:
            app.state.tracer.close()


def _allow_many_connections() -> None:
    """Each connection needs a file descriptor; the usual limit of 1024 is there for old programs that use select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class _Server(uvicorn.Server):
    """Stops in two steps: it refuses new requests and says so to probes, then it ends when the running ones have finished."""

    def __init__(self, config: uvicorn.Config, serving: Serving, save: Callable[[], None]) -> None:
        super().__init__(config)
        self._serving, self._save = serving, save
        self._deadline = 0.0
        self._next_save = monotonic() + SAVE_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._serving.draining:
            self.should_exit = True
        self._deadline = monotonic() + self._serving.options.drain_seconds
        self._serving.draining = True

    async def on_tick(self, counter: int) -> bool:
        now = monotonic()
        if now >= self._next_save:
            await asyncio.to_thread(self._save)
            self._next_save = now + SAVE_SECONDS
        over = self._serving.draining and (self._serving.active == 0 or now >= self._deadline)
        if over and self._serving.active:
            LOGGER.warning("%d requests did not finish in time; they are cancelled.", self._serving.active)
            await asyncio.to_thread(self._serving.service.close)
        return await super().on_tick(counter) or over


class _PatientProtocol(H11Protocol):
    """Closes a connection that begins a request and does not complete its head, or never begins one."""

    seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the timer exactly while no request is being answered."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.abort)
        elif not waiting and self._timer:
            self._timer.cancel()
            self._timer = None
