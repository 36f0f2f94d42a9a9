"""The server as an ASGI application."""

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

import eesd
from eesd.runtime.batch.service import Service
from eesd.serve.anthropic import messages
from eesd.serve.http import probes
from eesd.serve.http.errors import handle_errors, path_of
from eesd.serve.http.gate import Gate
from eesd.serve.http.observe import QUIET, Observe
from eesd.serve.http.options import ServeOptions, Serving
from eesd.serve.openai import chat, completions, responses, tokens
from eesd.serve.page.routes import FILES, mount_page

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    tokens.router,
    probes.router,
)


class _Application(FastAPI):
    """An application that drops the query of a URL. No route reads the query, and a trace would
    show it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "query_string": b""}, receive, send)


def make_app(service: Service, options: ServeOptions) -> FastAPI:
    """Make the application for a running service.

    ``app.state.serving`` is the :class:`~eesd.serve.http.options.Serving` of its routes. The caller
    closes the service.

    Args:
        service: The batch.
        options: Limits and names.
    """
    # Each request has one span if OpenTelemetry is configured (older versions ignore this). There
    # are no documentation pages, because they load scripts from other hosts.
    traced: Any = {"operation_spans": False, "exclude": lambda scope: path_of(scope) in QUIET}
    app = _Application(
        title="EESD",
        version=eesd.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=traced,
    )
    app.state.serving = Serving(service=service, options=options)
    for router in ROUTERS:
        app.include_router(router)
    mount_page(app)
    handle_errors(app)
    open_paths = ("/health", "/ready", *(["/metrics"] if options.metrics_open else []), *FILES)
    app.add_middleware(Gate, serving=app.state.serving, open_paths=open_paths)
    if options.allowed_origins:  # outside the gate, because a preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    paths = frozenset(
        route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)
    )
    app.add_middleware(Observe, serving=app.state.serving, paths=paths)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign] # FastAPI's way to change it
    return app


def _schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema with two changes: an invalid body gives status 400, as in OpenAI's
    API, and the API key is a bearer token."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    if app.state.serving.options.api_keys:
        schema["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
    return schema
