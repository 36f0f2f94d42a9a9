"""How the server runs on Ray: the options of ``eesd-serve``, and how many replicas there are."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from eesd.common.checks import check_integer, check_number, shown
from eesd.common.errors import EESDError
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.cli import speculation_of
from eesd.runtime.engine_options import EXPORT_OPTIONS
from eesd.runtime.llm import Speculation
from eesd.serve.cli import batch_of, limits_of, main
from eesd.serve.http.options import ServeOptions

PREFIX = "EESD_SERVE_"
"""Of the variables that give options, as for ``eesd-serve``."""
ELSEWHERE = (
    *("model", *EXPORT_OPTIONS, "cache_dir"),  # every node needs the engine directory before
    # Ray has its own.
    *("host", "port", "send_timeout", "drain_seconds", "log_format", "triton_repo"),
    *("threads", "max_queue"),  # follow from num_cpus and max_rows
)
"""Options of ``eesd-serve`` that are none on Ray."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas there are, and what each needs.

    Attributes:
        min_replicas, max_replicas: Replicas of the engines. Their number follows the requests that
            wait and run.
        num_cpus, num_gpus: What a replica needs. It runs as many threads as it has whole CPUs, and
            one at least.
        max_requests: Most requests in all; more are refused with 429.

    Raises:
        EESDError: A value has another type, or is out of range.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_requests: int = 1024

    def __post_init__(self) -> None:
        check_integer("min_replicas", self.min_replicas, 1, 1 << 16)
        check_integer("max_replicas", self.max_replicas, self.min_replicas, 1 << 16)
        check_integer("max_requests", self.max_requests, 1, 1 << 20)
        for name in ("num_cpus", "num_gpus"):
            check_number(
                name, getattr(self, name), lambda x: 0 <= x < 1e6, "a number of at least 0"
            )


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How the server runs on Ray.

    Attributes:
        engine_dir: The engine directory, on every node.
        scale: The replicas.
        limits: Limits and names of the server.
        batch: Limits of the batch of a replica; as many requests as it has rows may wait there.
        speculation: How to draft.
        engine: The options of ``eesd-serve`` by name, of which a replica takes those of the
            engines.
    """

    engine_dir: Path
    scale: Scale
    limits: ServeOptions
    batch: BatchOptions
    speculation: Speculation
    engine: dict[str, Any]


_OWN = [
    click.Option([f"--{one.name.replace('_', '-')}"], type=one.type, default=one.default)
    for one in fields(Scale)
]
_SHARED = [option for option in main.params if option.expose_value and option.name not in ELSEWHERE]
_COMMAND = click.Command(None, params=[*_OWN, *_SHARED])
"""Reads arguments as ``eesd-serve`` reads its options."""


def read_options(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> RayOptions:
    """Options from Serve's arguments and the environment: those of :class:`Scale` and, by their
    names, of ``eesd-serve``.

    Each may be given as an argument (``serve run eesd.serve.ray.app:app engine_dir=plans/``), in a
    configuration file of Serve (``args``), or in the environment (``EESD_SERVE_ENGINE_DIR``). An
    argument comes before the environment. The values of an option that may be repeated are a list,
    or have blanks between them.

    Raises:
        EESDError: One is unknown or unusable, or there is no engine directory.
    """
    known = {str(option.name): option for option in _COMMAND.params}
    variables = {
        name.removeprefix(PREFIX).lower(): name
        for name in sorted(environment)
        if name.startswith(PREFIX)
    }
    for name, variable in variables.items():
        if name not in known:
            raise EESDError(
                f"The variable {variable} names no option on Ray; unset it. The options are "
                f"{', '.join(known)}."
            )
    for name in arguments:
        if name not in known:
            raise EESDError(
                f"There is no argument {shown(name)}; the arguments are {', '.join(known)}."
            )
    given = {name: environment[variable] for name, variable in variables.items()} | dict(arguments)
    for name, value in given.items():
        if getattr(known[name], "multiple", False) and isinstance(value, str):
            given[name] = value.split()
    context = click.Context(_COMMAND, default_map=given)
    try:
        _COMMAND.parse_args(context, [])
    except click.BadParameter as error:
        name = error.param.name if error.param else ""
        raise EESDError(
            f"{name} is {shown(given.get(str(name)))}, which cannot be used: "
            f"{error.message.rstrip('.')}."
        ) from None
    options = context.params
    if options["engine_dir"] is None:
        raise EESDError(
            f"There is no engine directory; give engine_dir=DIR, or set {PREFIX}ENGINE_DIR."
        )
    scale = Scale(**{one.name: options[one.name] for one in fields(Scale)})
    options |= {"threads": max(1, int(scale.num_cpus)), "max_queue": options["max_rows"]}
    return RayOptions(
        engine_dir=options["engine_dir"],
        scale=scale,
        limits=limits_of(options),
        batch=batch_of(options),
        speculation=speculation_of(options),
        engine=options,
    )
