"""Gives each HTTP request an id and a log line, and adds facts to the request's trace."""

import json
import logging
import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd.serve.http.errors import LEFT, as_api_error, path_of
from eesd.serve.http.options import Serving

try:
    from opentelemetry.trace import get_current_span
except ImportError:
    get_current_span = None  # type: ignore[assignment] # not installed, so nothing is traced

LOGGER = logging.getLogger("eesd.serve")
QUIET = ("/health", "/ready", "/metrics")
"""Paths that are polled constantly. Requests for them are not logged, need no place in the batch,
and are answered even while the server stops."""
TRACED = {
    "route": "http.route",
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "model": "gen_ai.request.model",
    "response_model": "gen_ai.response.model",
    "response_id": "gen_ai.response.id",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "first_token_seconds": "gen_ai.response.time_to_first_chunk",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "prefill_seconds": "gen_ai.latency.time_in_model_prefill",
}
"""The names that facts have in traces. They are OpenTelemetry's conventional names, except that two
times have vLLM's names because the conventions lack them. The names of all other facts begin with
``eesd.``."""
OPERATIONS = {
    "/v1/completions": "text_completion",
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
}
"""The operation of each generating route. It has the name from OpenTelemetry's conventions."""
_REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
_GIVEN_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class JSONFormatter(logging.Formatter):
    """Writes one JSON object per line. The object has the time, the level, the logger, the message,
    the ``request_id``, and the facts of a request."""

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
    """Writes a readable line, with the id of the request and its facts after the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        request_id = _REQUEST_ID.get()
        more = ({"request_id": request_id} if request_id else {}) | facts
        return _printable(
            super().formatMessage(record)
            + "".join(f" {name}={value}" for name, value in more.items())
        )


def _printable(text: str) -> str:
    """Return a text without characters that would begin a new line or control a terminal."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def log_to_stderr(form: str) -> None:
    """Write messages of level INFO and above to stderr in the format ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _add_to_span(facts: Mapping[str, Any]) -> None:
    """Add a request's id and facts to the request's span, if it has a span that has not ended."""
    if get_current_span is not None and (span := get_current_span()).is_recording():
        named = {"request_id": _REQUEST_ID.get() or ""} | dict(facts)
        span.set_attributes(
            {TRACED.get(name, f"eesd.{name}"): value for name, value in named.items()}
        )


class Observe:
    """ASGI middleware around the whole application. It gives each request an id and a log line. If
    a route raises an exception, it answers with an error.

    If ``opentelemetry-instrument`` runs the server, the trace gets the same facts.
    """

    def __init__(self, app: ASGIApp, serving: Serving, paths: Collection[str]) -> None:
        """``paths`` are the paths of the routes. Metrics count all other paths together, because
        clients can make up any number of paths."""
        self._app = app
        self._serving = serving
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in QUIET:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid4().hex
        _REQUEST_ID.set(request_id)
        # Use the path as it was sent, because a decoded path could begin a new line.
        path = scope["raw_path"].decode("latin-1")[:200]
        facts: dict[str, Any] = {"method": scope["method"], "path": path}
        if scope.get("client"):
            facts["client"] = scope["client"][0]
        traced = self._traced(path_of(scope))
        status = LEFT
        start = monotonic()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                outcome = _outcome(scope, status, start)
                for name in ("keywords", "fields"):
                    if ignored := outcome.get(f"ignored_{name}"):
                        headers[f"X-Ignored-{name.title()}"] = ", ".join(ignored)
            elif not message.get("more_body", False):  # sending this message ends the span
                _add_to_span(traced | facts | _outcome(scope, status, start))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            LOGGER.error("A request failed.", exc_info=error)
            if status == LEFT:
                await as_api_error(error).response_for(scope)(scope, receive, sending)
        finally:
            if scope.get("state", {}).get("left"):
                status = LEFT
            facts |= _outcome(scope, status, start)
            _add_to_span(traced | facts)
            self._serving.metrics.answered(scope["method"], traced["route"], status)
            LOGGER.info("%s %s %s", facts["method"], facts["path"], status, extra={"facts": facts})

    def _traced(self, path: str) -> dict[str, str]:
        """Return the facts about a request that only a trace has. These are the route and, if the
        route generates text, the operation."""
        if path not in self._paths:
            return {"route": "other"}
        if path not in OPERATIONS:
            return {"route": path}
        return {
            "route": path,
            "operation": OPERATIONS[path],
            "provider": "eesd",
            "response_model": self._serving.model_name,
        }


def _outcome(scope: Scope, status: int, start: float) -> dict[str, Any]:
    """Return the outcome of a request so far. It has the status, the seconds, the name of the key,
    the requested model, the fields that had no effect, and the numbers of tokens."""
    state = scope.get("state", {})
    found: dict[str, Any] = {"status": status, "seconds": round(monotonic() - start, 4)}
    for name in ("key", "model", "ignored_fields"):
        if state.get(name):
            found[name] = state[name]
    if "generations" in state:
        found |= state["generations"].facts()
    return found
