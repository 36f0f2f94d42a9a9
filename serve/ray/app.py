"""The server on Ray Serve: ``serve run eesd.serve.ray.app:app engine_dir=plans/ max_replicas=4``.

One deployment answers HTTP and reads text; the other has the engines, in as many replicas as the
load needs.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from eesd.common.manifest import load_manifest
from eesd.runtime.batch.service import Service
from eesd.runtime.cli import load_as_asked
from eesd.runtime.constraint import of_grammar
from eesd.runtime.request import Request, Update
from eesd.serve.app import make_app
from eesd.serve.ray.metrics import LoadMetrics, RayMetrics
from eesd.serve.ray.options import RayOptions, read_options
from eesd.serve.ray.router import PrefixRouter
from eesd.serve.ray.service import RemoteService

LOGGER = logging.getLogger(__name__)
LIVENESS_SECONDS = 5.0
"""How often a request that hears nothing looks whether the batch is alive."""


class Engine:
    """A replica: one batch."""

    def __init__(self, options: RayOptions) -> None:
        llm = load_as_asked(options.engine_dir, options.engine, options.speculation)
        self._service = Service(llm, options.batch)
        self._metrics = LoadMetrics(options.limits.model_name or llm.manifest.model)

    async def generate(self, request: Request, grammar: str | None) -> AsyncGenerator[Update, None]:
        """What comes of a request, under a grammar if there is one. It is cancelled when nobody
        reads on."""
        if grammar is not None:  # in a thread: a grammar may take long to read
            request = replace(
                request, constraint=await asyncio.to_thread(of_grammar, grammar, self._service.llm)
            )
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def deliver(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed: the replica has stopped
                loop.call_soon_threadsafe(updates.put_nowait, update)

        generation = self._service.submit(request, deliver)
        try:
            ended = False
            while not ended:
                with suppress(TimeoutError):
                    update = await asyncio.wait_for(updates.get(), LIVENESS_SECONDS)
                    ended = update.finish_reason is not None
                    yield update
                self._check_alive()
        finally:
            generation.cancel()

    def longest(self) -> int:
        """Most tokens of a text, its prompt included, for which there is memory."""
        return self._service.longest

    def check_health(self) -> None:
        """Called by Ray every few seconds. It replaces a replica for which this raises."""
        self._check_alive()
        self._metrics.note(self._service)

    def _check_alive(self) -> None:
        if not self._service.alive:
            raise RuntimeError("The batch has stopped.")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


class Ingress:
    """OpenAI's API: the same routes as ``eesd-serve``, over the replicas."""

    async def __init__(self, engine: DeploymentHandle, options: RayOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = engine.options(stream=True)
        self._options = options
        self._longest = await engine.longest.remote()

    def __serve_build_asgi_app__(self) -> FastAPI:
        lost, options = (RayActorError, ReplicaUnavailableError), self._options
        service = RemoteService(
            options.engine_dir,
            self._stream,
            lost,
            options.scale.max_requests,
            self._longest,
            options.engine["generation_config"],
            options.engine["plain_content"],
        )
        return make_app(cast(Service, service), options.limits, RayMetrics)

    async def _stream(self, request: Request, grammar: str | None) -> AsyncGenerator[Update, None]:
        response = self._engine.generate.remote(request, grammar)
        try:
            async for update in response:
                yield update
        finally:
            response.cancel()


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application; Serve calls this with its arguments.

    Raises:
        EESDError: An option or the engine directory cannot be used.
    """
    options = read_options(arguments, os.environ)
    load_manifest(options.engine_dir)
    if not options.limits.api_keys:
        LOGGER.warning(
            "Everybody who reaches Ray's proxy may use the model; api_key_file restricts that."
        )
    scale, rows = options.scale, options.batch.max_rows
    engine = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        max_ongoing_requests=2 * rows,
        autoscaling_config={
            "min_replicas": scale.min_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": rows,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=30,
    )(Engine)
    ingress = serve.deployment(
        name="openai", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=scale.max_requests
    )(serve.ingress()(Ingress))
    return ingress.bind(engine.bind(options), options)
