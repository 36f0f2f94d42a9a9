"""What answers of both kinds begin with, and how their choices end."""

from dataclasses import dataclass
from time import time
from typing import Any
from uuid import uuid4

from fastapi import Request

from eesd.serve.generations import Progress
from eesd.serve.options import Serving


@dataclass(frozen=True)
class Head:
    """The fields that an answer, and each of its chunks, begins with."""

    fields: dict[str, Any]

    @classmethod
    def new(cls, prefix: str, kind: str, serving: Serving) -> "Head":
        """A head with an id of its own.

        Args:
            prefix: The id begins with it.
            kind: The ``object`` of the answer.
            serving: The server.
        """
        name = serving.model_name
        return cls({"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time()), "model": name})


def finished(progress: Progress) -> dict[str, Any]:
    """How a choice ended, so far not at all."""
    reason = {"stop_reason": progress.stop_reason} if progress.finish_reason else {}
    return {"finish_reason": progress.finish_reason, **reason}


def serving_of(request: Request) -> Serving:
    """The server that a request came to."""
    serving: Serving = request.app.state.serving
    return serving
