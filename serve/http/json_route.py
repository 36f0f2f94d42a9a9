"""Routes that check JSON from outside as they parse it. This module also gives routes access to the
server's state."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from eesd.common.errors import EESDError
from eesd.common.json_input import decode, parse_json
from eesd.serve.http.options import Serving


class _CheckedRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(
                decode(await self.body(), "The body", "send JSON"), "The body", "send JSON"
            )
        except EESDError as error:
            raise HTTPException(400, str(error)) from None


class JSONRoute(APIRoute):
    """Refuses JSON that is nested too deeply or not UTF-8. The error is one sentence."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handler(_CheckedRequest(request.scope, request.receive))

        return checked


def serving_of(request: Request) -> Serving:
    """Return the state of the server that received a request."""
    serving: Serving = request.app.state.serving
    return serving


Shared = Annotated[Serving, Depends(serving_of)]
"""The type of an argument with which a route gets the state of the server."""
