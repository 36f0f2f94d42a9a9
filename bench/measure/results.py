"""The result of a benchmark: one JSON file with every run. Reports are made from it.

Fields of the dataclasses are keys of the file. Some key names are older than the names in the code.
"""

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from eesd.common import json_input, machine, machine_report
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.runtime.engines import operators

SCHEMA = 2
LIBRARIES = ("eesd", "numpy", "onnxruntime", "torch", "tokenizers")


def describe_machine() -> dict[str, str]:
    """Processor, cores that this process may use, kernels of the CPU engine, GPU, memory, system
    and library versions."""
    facts = machine_report.describe()
    return {
        "CPU": _cpu_model(),
        "cores": f"{machine.cores()} cores ({', '.join(machine_report.cpu_features())})",
        "kernels": "ONNX Runtime's" if operators.missing() else operators.fastest(),
        "memory": facts["memory"],
        "GPU": facts["GPU"],
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "libraries": ", ".join(
            f"{name} {found}" for name in LIBRARIES if (found := machine.installed(name))
        ),
    }


def shown_machine(facts: dict[str, str]) -> str:
    """The facts of :func:`describe_machine` as the beginning of a sentence. Older results do not
    name the kernels."""
    kernels = facts.get("kernels", "ONNX Runtime's")
    where = (
        f"{facts['CPU']}, {facts['cores']}, {facts['memory']}; {facts['system']}; CPU kernels: "
        f"{kernels}"
    )
    return where[:1].upper() + where[1:]


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@dataclass(frozen=True)
class Configuration:
    """One way of decoding.

    Attributes:
        engine: Name of the engine directory.
        sampling: ``greedy``, ``coupled`` or ``rejection``.
        controller: Controller and its options; None for plain decoding.
        width: Number of nodes in a level of the draft tree; 1 is a chain.
        budget: Whether a :class:`~eesd.controllers.tree_budget.TreeBudget` chooses the nodes to
            verify.
    """

    engine: str
    sampling: str
    controller: str | None
    width: int
    budget: bool = False


@dataclass(frozen=True)
class Run:
    """One prompt (its id) decoded in one configuration (its index).

    Attributes:
        rounds: Rounds by shape: [draft steps, drafted nodes, number of rounds].
        host_seconds: Decode time outside the engines.
        offered: Draft tokens judged at depth 1, 2, ... A token is judged if all tokens before it
            were accepted.
        accepted: Draft tokens accepted at depth 1, 2, ...
        guard_rests: Number of times that the guard paused drafting.
        equal: Whether the tokens equal those of plain decoding. None with rejection sampling, which
            promises the distribution.
        divergence: If not equal, the index of the first different token.
        logit_gap: If not equal, the verifier's logit of the token that plain decoding has there,
            minus its logit of the drafting run's token.
    """

    prompt: str
    configuration: int
    new_tokens: int
    rounds: list[list[int]]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    offered: list[int]
    accepted: list[int]
    guard_rests: int
    equal: bool | None
    divergence: int | None = None
    logit_gap: float | None = None

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def round_count(self) -> int:
        return sum(count for _, _, count in self.rounds)

    @property
    def draft_steps(self) -> int:
        return sum(steps * count for steps, _, count in self.rounds)


@dataclass(frozen=True)
class CallLatency:
    """Seconds of a round's calls, measured after one prompt with trees of one width.

    Attributes:
        draft: Seconds of all draft steps of a round, by their number: [[steps, seconds], ...].
        verify: Seconds of the verify pass, by its nodes: [[nodes, seconds], ...].
    """

    engine: str
    prompt: str
    width: int
    draft: list[list[float]]
    verify: list[list[float]]


@dataclass(frozen=True)
class Tuning:
    """A controller's candidate settings, measured on the tuning prompts.

    Attributes:
        seconds: Decode seconds of all tuning prompts together, by candidate.
        acceptance: [accepted, judged] tokens at depth 1, 2, ..., by candidate.
        chosen: The fastest candidate.
    """

    engine: str
    sampling: str
    width: int
    controller: str
    seconds: dict[str, float]
    acceptance: dict[str, list[list[int]]]
    chosen: str

    @property
    def longest(self) -> str:
        """The last candidate; for ``fixed`` the longest length."""
        return list(self.seconds)[-1]


def _values(item: Any) -> Any:
    """A dataclass as JSON values."""
    return item.to_dict() if hasattr(item, "to_dict") else asdict(item)


def refuse_existing(*paths: Path) -> None:
    """Raise :class:`EESDError` if one of these files exists."""
    if path := next(filter(Path.exists, paths), None):
        raise EESDError(
            f"{path} exists; give --overwrite, --resume where there is one, or another --output."
        )


class Saved:
    """A dataclass that is stored as a JSON file, with a line for each item of its lists."""

    WHAT: ClassVar[str]
    """Name of the kind of file, for a message."""
    ROWS: ClassVar[Mapping[str, Callable[..., Any]]]
    """Names of the lists of dataclasses, and a function that makes an item from its values. Every
    file of this kind has all these lists."""
    SAME: ClassVar[Sequence[str]] = ("options", "machine")
    """Attributes that a resumed run must have in common with the file."""
    schema: int

    def save(self, path: Path) -> None:
        """Write the file atomically. Each item of its lists, a dataclass or a dict, gets a line."""
        parts = []
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, list):
                rows = [
                    json.dumps(row if isinstance(row, dict) else rounded(_values(row)))
                    for row in value
                ]
                parts.append(f'"{item.name}": [\n' + ",\n".join(rows) + "\n]")
            else:
                parts.append(f'"{item.name}": {json.dumps(value)}')
        with written_whole(path) as temporary:
            temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`save` wrote. Raises :class:`EESDError` for any other file, and
        for another schema."""
        raw = read_json(path)
        if not cls.wrote(raw):
            raise EESDError(f"{path} is not {cls.WHAT}.")
        if raw.get("schema") != cls.schema:
            raise EESDError(
                f"{path} has schema {raw.get('schema')}, this EESD reads schema {cls.schema}; "
                "measure again."
            )
        try:
            return cls(
                **raw
                | {name: [kind(**row) for row in raw[name]] for name, kind in cls.ROWS.items()}
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EESDError(
                f"{path} is damaged (a value is missing or unknown); measure again."
            ) from None

    def begun(self, path: Path, resume: bool, overwrite: bool) -> Self:
        """The result to continue: with ``resume`` the file at ``path``, if it exists; else this
        result.

        Raises:
            EESDError: A file exists and is to be neither resumed nor overwritten, or an attribute
                in ``SAME`` differs.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (resume and path.exists()):
            if not overwrite:
                refuse_existing(path)
            return self
        found = type(self).load(path)
        for what in self.SAME:
            if getattr(found, what) != getattr(self, what):
                raise EESDError(
                    f"{path} was measured with other {what}, so it cannot be resumed; use "
                    "--overwrite."
                )
        return found

    @classmethod
    def wrote(cls, raw: Any) -> bool:
        """Whether a JSON value is a file of this kind, even a damaged one."""
        return isinstance(raw, dict) and next(iter(cls.ROWS)) in raw


@dataclass
class Result(Saved):
    """Everything that one benchmark measured.

    Attributes:
        kind: ``run``; older results that compare exit heads have ``ablation``.
        options: The :class:`~eesd.bench.measure.run.Options`.
        engines: Description of each engine directory by name, in the order of measurement.
        prompts: The reported prompts: id, task, number of tokens.
        machine: Description of the machine.
        tunings: Tuned controllers.
        configurations: Ways to decode; ``Run.configuration`` is an index of them.
        sweeps: Call latencies of each prompt and width.
        runs: All runs. The runs of one prompt on one engine are saved together.
        complete: Whether every prompt was measured.
        schema: Version of the file format.
    """

    kind: str
    options: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    prompts: list[dict[str, Any]]
    machine: dict[str, str] = field(default_factory=describe_machine)
    tunings: list[Tuning] = field(default_factory=list)
    configurations: list[Configuration] = field(default_factory=list)
    sweeps: list[CallLatency] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    def has_runs(self, engine: str, prompt: str) -> bool:
        """Whether this prompt was measured on this engine."""
        return any(
            run.prompt == prompt and self.configurations[run.configuration].engine == engine
            for run in self.runs
        )

    def index_of(self, configuration: Configuration) -> int:
        """The index of a configuration. A new configuration is added."""
        if configuration not in self.configurations:
            self.configurations.append(configuration)
        return self.configurations.index(configuration)

    WHAT: ClassVar = "a result of eesd-bench; give a result.json"
    ROWS: ClassVar = {
        "tunings": Tuning,
        "configurations": Configuration,
        "sweeps": CallLatency,
        "runs": Run,
    }


def acceptance_by_depth(runs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Sum up [accepted, judged] tokens at each depth over runs, each given as its (accepted,
    judged) counts by depth."""
    total: list[list[int]] = []
    for accepted, judged in runs:
        total += [[0, 0] for _ in range(len(judged) - len(total))]
        for sums, *counts in zip(total, accepted, judged, strict=False):
            sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
    return total


def rounded(value: Any) -> Any:
    """Round every float of a JSON value to 7 decimals, a tenth of a microsecond: more digits would
    be noise, and would double the file."""
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def read_json(path: Path) -> Any:
    """The JSON value of a file that eesd-bench wrote. Raises :class:`EESDError` if the file is not
    JSON."""
    return json_input.read_json(path, "give a file that eesd-bench wrote")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
