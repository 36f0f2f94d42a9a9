"""``/health``, ``/ready`` and ``/metrics``, for monitoring."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from eesd.serve.http.errors import ERRORS, APIError
from eesd.serve.http.json_route import Shared

router = APIRouter(responses={status: ERRORS[status] for status in (401, 503)})


@router.get("/health", response_class=PlainTextResponse)
async def health(serving: Shared) -> str:
    """Answer with status 200 while the batch is alive. With any other answer, restart the
    server."""
    if not serving.service.alive:
        raise APIError(503, "The batch has stopped; restart the server.", code="internal_error")
    return "ok"


@router.get("/ready", response_class=PlainTextResponse)
async def ready(serving: Shared) -> str:
    """Answer with status 200 while the server takes requests. With any other answer, send requests
    elsewhere."""
    if not serving.ready:
        raise APIError(
            503, "The server is stopping; send the request to another server.", code="stopping"
        )
    return "ok"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(serving: Shared) -> Response:
    """Return the counters, gauges and histograms for Prometheus."""
    return Response(serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
