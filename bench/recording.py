"""Records the traces that replays need: of the prompts to report, and of others to tune on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eesd.bench.costs import CostModel, costs_of
from eesd.bench.run import Bench, Encoded, Options
from eesd.bench.tasks import Prompt, split
from eesd.bench.traces import Trace, check_depth, load_trace, record
from eesd.common.errors import EESDError

TRACE, TUNING = "trace.npz", "tuning.npz"


def measure_costs(bench: Bench, prompts: Sequence[Encoded], options: Options) -> CostModel:
    """Costs of a chain's calls amid the texts of these prompts, as rounds make them."""
    sweeps = [sweep for prompt in prompts for sweep in bench.sweeps("", prompt, options)]
    manifest = bench.manifest
    return CostModel.of_seconds(f"{manifest.model}, {manifest.dtype}, as measured", costs_of(sweeps)["", 1])


class Recording:
    """Both traces of one engine in the directory ``output``, each written whole after every prompt.

    With ``keep`` those that are there are gone on with. Raises :class:`EESDError` when they were recorded otherwise, and for
    what cannot be recorded.
    """

    def __init__(self, bench: Bench, prompts: Sequence[Prompt], options: Options, depth: int, output: Path, keep: bool) -> None:
        check_depth(bench.manifest, depth)
        self._bench, self._options, self._depth = bench, options, depth
        self._tasks = {prompt.id: prompt.task for prompt in prompts}
        groups = [bench.encode(part, options) for part in split(prompts, options.tuning_per_task, options.per_task)]
        self._parts = []
        for path, encoded in zip((output / TUNING, output / TRACE), groups, strict=True):
            origin = _origin(bench, encoded, options, depth)
            self._parts.append((path, encoded, origin, _kept(path, origin) if keep and path.exists() else None))
            if not keep:
                path.unlink(missing_ok=True)  # of a measurement before, which an interrupted one must not be mixed with
        output.mkdir(parents=True, exist_ok=True)

    def steps(self) -> Iterator[None]:
        """Record what is missing; yields after every prompt."""
        bench, options = self._bench, self._options
        costs = next((kept.costs for _, _, _, kept in self._parts if kept), None)
        costs = costs or measure_costs(bench, self._parts[0][1], options)
        for path, encoded, origin, kept in self._parts:
            requests = list(kept.requests) if kept else []
            for prompt in encoded[len(requests) :]:
                sampling = options.sampling(options.samplings[0], prompt.number)
                task, length = self._tasks[prompt.id], options.max_new_tokens
                requests.append(record(bench.llm, task, prompt.tokens, sampling, length, self._depth))
                Trace(tuple(requests), origin, costs, bench.manifest.exit_head.calibration).save(path)
                yield


def _origin(bench: Bench, prompts: Sequence[Encoded], options: Options, depth: int) -> dict[str, Any]:
    """What a trace depends on; two that are equal in it have the same requests."""
    names = ("samplings", "temperature", "seed", "max_new_tokens", "backend", "threads")
    said = {name: value for name, value in options.to_dict().items() if name in names}
    digest = hashlib.sha256(json.dumps([prompt.tokens for prompt in prompts]).encode()).hexdigest()
    prior = bench.manifest.exit_head.calibration
    return bench.facts() | said | {"depth": depth, "prompts": digest, "prior": prior.to_dict() if prior else None}


def _kept(path: Path, origin: dict[str, Any]) -> Trace:
    found = load_trace(path)
    if found.origin != origin:
        raise EESDError(f"{path} was recorded with other options, engines or prompts; use --overwrite.")
    return found


def check_pair(trace: Trace, tuning: Trace) -> None:
    """Raise :class:`EESDError` unless both are of the same engines and sampling, and of different prompts."""
    if trace.origin.get("prompts") == tuning.origin.get("prompts"):
        raise EESDError("Both traces are of the same prompts; tune on others than those to report.")
    if trace.origin | {"prompts": ""} != tuning.origin | {"prompts": ""}:
        raise EESDError("The traces are of different engines or options; record both with one command.")
