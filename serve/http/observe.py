"""A log line, an id and, if asked for, a trace of each HTTP request."""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import import_module
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd.serve.http.errors import LEFT, as_api_error
from eesd.serve.http.options import Serving

LOGGER = logging.getLogger("eesd.serve")
QUIET = ("/health", "/ready", "/metrics")
"""Paths that are asked for all the time. They are not logged, need no place in the batch, and answer while the server stops."""
TRACE_ENDPOINT = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
LOG_FORMATS = ("text", "json")
_REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
_GIVEN_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request_id, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """One readable line, with the id of the request and its facts behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        request_id = _REQUEST_ID.get()
        more = ({"request_id": request_id} if request_id else {}) | facts
        return _printable(super().formatMessage(record) + "".join(f" {name}={value}" for name, value in more.items()))


def _printable(text: str) -> str:
    """A text without what would begin a line of its own, or change a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def log_to_stderr(form: str) -> None:
    """Send everything from level INFO on to stderr, as ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class Tracer:
    """Sends a span of each request to the collector that OpenTelemetry's environment variables name."""

    def __init__(self) -> None:
        trace = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        name = os.environ.get("OTEL_SERVICE_NAME", "eesd-serve")
        resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": name})
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("eesd.serve")
        self._extract = import_module("opentelemetry.propagate").extract
        self._server = trace.SpanKind.SERVER

    @contextmanager
    def span(self, name: str, headers: Headers, facts: dict[str, Any]) -> Iterator[None]:
        """A span around a request, below the client's if it names one; ``facts`` become attributes at the end."""
        parent = self._extract(dict(headers))
        with self._tracer.start_as_current_span(name, context=parent, kind=self._server) as span:
            try:
                yield
            finally:
                span.set_attributes({f"eesd.{key}": value for key, value in facts.items()})

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def tracer_from_environment() -> Tracer | None:
    """A tracer if the environment asks for one. Without the packages it is only a warning: serving goes before tracing."""
    if not any(map(os.environ.get, TRACE_ENDPOINT)):
        return None
    try:
        return Tracer()
    except ImportError:
        LOGGER.warning("There are no traces: OpenTelemetry is not installed; pip install 'eesd[otel]'.")
        return None


class Observe:
    """ASGI middleware around everything: an id, a log line and a trace for each request, and an answer to exceptions."""

    def __init__(self, app: ASGIApp, tracer: Tracer | None, serving: Serving, paths: Collection[str]) -> None:
        """``paths`` are those of the routes. Metrics count all other ones together, as anybody can make up more."""
        self._app, self._tracer, self._metrics, self._paths = app, tracer, serving.metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid4().hex
        _REQUEST_ID.set(request_id)
        path = scope["raw_path"].decode("latin-1")[:200]  # as it was sent: decoded, it could begin a line of its own
        facts: dict[str, Any] = {"method": scope["method"], "path": path}
        if scope.get("client"):
            facts["client"] = scope["client"][0]
        if self._tracer is None:
            await self._observed(scope, receive, send, request_id, facts)
        else:
            with self._tracer.span(f"{scope['method']} {path}", headers, facts):
                await self._observed(scope, receive, send, request_id, facts)

    async def _observed(self, scope: Scope, receive: Receive, send: Send, request_id: str, facts: dict[str, Any]) -> None:
        status: int | None = None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        start = monotonic()
        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            LOGGER.error("A request failed.", exc_info=error)
            if status is None:
                await as_api_error(error).response(scope, receive, sending)
        finally:
            facts |= {"status": status or LEFT, "seconds": round(monotonic() - start, 4)}
            state = scope.get("state", {})
            facts |= {"key": state["key"]} if state.get("key") else {}
            facts |= state["generations"].facts() if state.get("generations") else {}
            self._metrics.answered(scope["path"] if scope["path"] in self._paths else "other", facts["status"])
            LOGGER.info("%s %s %s", facts["method"], facts["path"], facts["status"], extra={"facts": facts})
