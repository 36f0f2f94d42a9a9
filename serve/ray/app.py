"""The server on Ray Serve: ``serve run eesd.serve.ray.app:app engine_dir=plans/ max_replicas=4``.

One deployment answers HTTP and reads text; the other has the engines, in as many replicas as the load needs.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from eesd.common.checks import check_integer, check_number, shown
from eesd.common.errors import EESDError
from eesd.common.manifest_reader import load_manifest
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.constraint import of_grammar
from eesd.runtime.llm import load
from eesd.runtime.request import Request, Update
from eesd.serve.app import make_app
from eesd.serve.http.options import ServeOptions
from eesd.serve.ray.router import PrefixRouter
from eesd.serve.ray.service import RemoteService

LIVENESS_SECONDS = 5.0
"""How often a request that hears nothing looks whether the batch is alive."""
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How the server runs on Ray.

    Each may be given as an argument (``serve run eesd.serve.ray.app:app engine_dir=plans/``), in a configuration file of Serve
    (``args``), or in the environment (``EESD_ENGINE_DIR``). An argument comes before the environment.

    Attributes:
        engine_dir: The engine directory, on every node.
        backend: ``auto``, ``tensorrt``, ``ort`` or ``torch``.
        min_replicas, max_replicas: Replicas of the engines. Their number follows the requests that wait and run.
        num_cpus, num_gpus: What a replica needs. It runs as many threads as it has whole CPUs, and one at least.
        max_rows: Most requests at once in a replica; as many again may wait there.
        max_requests: Most requests in all; more are refused with 429.
        model_name: The name that clients give as ``model``; "": the name in the engine directory.
        plain_content: As for :func:`eesd.load`.

    Raises:
        EESDError: A value has another type, or is out of range.
    """

    engine_dir: str
    backend: str = "auto"
    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_rows: int = 16
    max_requests: int = 1024
    model_name: str = ""
    plain_content: bool = False

    def __post_init__(self) -> None:
        check_integer("min_replicas", self.min_replicas, 1, 1 << 16)
        check_integer("max_replicas", self.max_replicas, self.min_replicas, 1 << 16)
        check_integer("max_rows", self.max_rows, 1, 1 << 16)
        check_integer("max_requests", self.max_requests, 1, 1 << 20)
        for name in ("num_cpus", "num_gpus"):
            check_number(name, getattr(self, name), lambda x: 0 <= x < 1e6, "a number of at least 0")


def read_options(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> RayOptions:
    """Options from Serve's arguments and the environment.

    Raises:
        EESDError: One is unknown or unusable, or there is no engine directory.
    """
    known = {field.name: cast(type, field.type) for field in fields(RayOptions)}
    for name in arguments:
        if name not in known:
            raise EESDError(f"There is no argument {shown(name)}; the arguments are {', '.join(known)}.")
    variables = {name: f"EESD_{name.upper()}" for name in known}
    given: dict[str, Any] = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    given |= arguments
    if not given.get("engine_dir"):
        raise EESDError("There is no engine directory; give engine_dir=DIR, or set EESD_ENGINE_DIR.")
    for name, value in given.items():
        try:
            given[name] = FLAGS[str(value).lower()] if known[name] is bool else known[name](value)
        except (KeyError, TypeError, ValueError):
            raise EESDError(f"{name} is {shown(value)}; it must be of the type {known[name].__name__}.") from None
    return RayOptions(**given)


class Engine:
    """A replica: one batch."""

    def __init__(self, options: RayOptions) -> None:
        llm = load(options.engine_dir, options.backend, threads=max(1, int(options.num_cpus)))
        self._service = Service(llm, BatchOptions(max_rows=options.max_rows, max_queue=options.max_rows))

    async def generate(self, request: Request, grammar: str | None) -> AsyncGenerator[Update, None]:
        """What comes of a request, under a grammar if there is one. It is cancelled when nobody reads on."""
        if grammar is not None:  # in a thread: a grammar may take long to read
            request = replace(request, constraint=await asyncio.to_thread(of_grammar, grammar, self._service.llm))
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
                self.check_health()
        finally:
            generation.cancel()

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica for which this raises."""
        if not self._service.alive:
            raise RuntimeError("The batch has stopped.")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


class Ingress:
    """OpenAI's API: the same routes as ``eesd-serve``, over the replicas."""

    def __init__(self, engine: DeploymentHandle, options: RayOptions) -> None:
        self._engine = engine.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> FastAPI:
        lost = (RayActorError, ReplicaUnavailableError)
        options = self._options
        directory = Path(options.engine_dir)
        service = RemoteService(directory, self._stream, lost, options.max_requests, options.plain_content)
        return make_app(cast(Service, service), ServeOptions(model_name=options.model_name))

    async def _stream(self, request: Request, grammar: str | None) -> AsyncGenerator[Update, None]:
        response = self._engine.generate.remote(request, grammar)
        try:
            async for update in response:
                yield update
        finally:
            response.cancel()


def app(arguments: dict[str, str]) -> serve.Application:
    """The application; Serve calls this with its arguments.

    Raises:
        EESDError: An option or the engine directory cannot be used.
    """
    options = read_options(arguments, os.environ)
    load_manifest(Path(options.engine_dir))
    engine = serve.deployment(
        name="engine",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=2 * options.max_rows,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.max_rows,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=30,
    )(Engine)
    ingress = serve.deployment(name="openai", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=options.max_requests)(
        serve.ingress()(Ingress)
    )
    return ingress.bind(engine.bind(options), options)
