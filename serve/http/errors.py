"""Errors in the form of OpenAI's API, which is ``{"error": {"message", "type", "param",
"code"}}``."""

import json
from collections.abc import Mapping
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from eesd.common.errors import EESDError
from eesd.runtime.batch.service import ClosedError
from eesd.runtime.request import QueueFullError

STATUSES = {
    400: ("invalid_request_error", "The request cannot be used."),
    401: ("authentication_error", "The API key is missing or wrong."),
    404: ("not_found_error", "There is no such model or path."),
    405: ("invalid_request_error", ""),
    408: ("timeout_error", "The body came too slowly."),
    413: ("invalid_request_error", "The body is too large."),
    415: ("invalid_request_error", "The body has a coding that is not read."),
    429: ("rate_limit_error", "The queue is full; Retry-After says when to try again."),
    500: ("server_error", "The server failed."),
    503: ("service_unavailable_error", "The server is stopping, or cannot answer in time."),
}
"""Maps each error status to the type that the body has, and to the description in the schema of a
route. The description is "" if no route declares the status."""
NO_PATH = (
    "There is no such path here; /openapi.json lists all, such as /v1/chat/completions and "
    "/v1/completions."
)
LEFT = 499
"""The status that the log shows for a request whose client left."""


class ErrorDetail(BaseModel):
    """The details of an error. Its ``message`` is one sentence."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "model": ErrorBody}
    for status, (_, words) in STATUSES.items()
    if words
}
"""Responses that routes declare in the schema."""
ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, **ERRORS}
"""Responses that streaming routes declare."""


class APIError(Exception):
    """An error with an HTTP status.

    Attributes:
        status: One of :data:`STATUSES`.
        message: One sentence that says what is wrong and what to do.
        param: The field of the body that is wrong.
        code: A machine-readable code.
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """The machine-readable type for the status."""
        return STATUSES[self.status][0]

    @property
    def body(self) -> bytes:
        detail = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        # The JSON is ASCII, because the message may quote half a surrogate pair.
        return json.dumps({"error": detail}).encode()

    def response_for(self, scope: Scope) -> Response:
        """Return the response to a request. In Anthropic's form, the response has one more
        field."""
        body = self.body
        if path_of(scope).startswith("/v1/messages"):
            body = b'{"type": "error", ' + body[1:]
        return Response(body, self.status, self.headers, "application/json")


def unsupported(param: str, message: str) -> APIError:
    """Make the error for a field whose feature this server does not support."""
    return APIError(400, message, param, "unsupported_value")


def path_of(scope: Scope) -> str:
    """Return the path of a request. If another server mounts the application under a prefix, the
    prefix is left out."""
    return str(scope["path"].removeprefix(scope.get("root_path", ""))) or "/"


class ClientLeftError(Exception):
    """The client has left, so the response is no longer needed."""


def as_api_error(error: Exception) -> APIError:
    """Return the error that a client receives for an exception. It reveals no details of bugs in
    the server."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        seconds = str(max(1, ceil(error.retry_after)))
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
    if isinstance(error, ClosedError):
        return APIError(
            503, "The server is stopping; send the request to another server.", code="stopping"
        )
    if isinstance(error, EESDError):
        return APIError(400, str(error))
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        status = error.status_code
        if status not in STATUSES:
            status = 400 if status < 500 else 500
        message = f"{str(error.detail).rstrip('.')}."
        if status == 404:
            message = NO_PATH
        return APIError(status, message, headers=error.headers)
    return APIError(500, "The server failed; its log says why.", code="internal_error")


def _invalid(error: RequestValidationError) -> APIError:
    """Return the error for the first wrong field. If the field may have several forms, the message
    says for each form why it does not fit."""
    found = error.errors()
    place = [str(part) for part in found[0]["loc"] if part != "body"]
    if not place:
        return APIError(
            400, "The body is not a JSON object; send one with Content-Type: application/json."
        )
    messages = dict.fromkeys(
        str(item["msg"]).rstrip(".")
        for item in found
        if list(map(str, item["loc"]))[1:2] == place[:1]
    )
    wrong = "; or: ".join(list(messages)[:4])
    code = "missing" if found[0]["type"] == "missing" else "invalid_value"
    return APIError(
        400, f"{place[0]} cannot be used: {wrong[:1].lower()}{wrong[1:]}.", place[0], code
    )


def handle_errors(app: FastAPI) -> None:
    """Make the app answer every exception in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response_for(request.scope)

    async def left(_: Request, error: Exception) -> Response:  # noqa: ARG001 - the handlers' signature
        return Response(status_code=LEFT)

    app.add_exception_handler(ClientLeftError, left)
    for kind in (APIError, EESDError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
