"""The result of a benchmark. It is one JSON file that has every run, and reports are made from it.

Fields of the dataclasses are keys of the file. Some key names are older than the names in the code.
"""

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Describe the machine. The facts are the processor, the cores that this process may use, the
    kernels of the CPU engine, the GPU, the memory, the system, and the versions of libraries."""
    facts = machine_report.describe()
    return {
        "CPU": machine_report.processor_name(),
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
    """Return the facts of :func:`describe_machine` as the beginning of a sentence. Older results do
    not name the kernels."""
    kernels = facts.get("kernels", "ONNX Runtime's")
    where = (
        f"{facts['CPU']}, {facts['cores']}, {facts['memory']}; {facts['system']}; CPU kernels: "
        f"{kernels}"
    )
    return where[:1].upper() + where[1:]


@dataclass(frozen=True)
class Configuration:
    """One way of decoding.

    Attributes:
        engine: Name of the engine directory.
        sampling: ``greedy``, ``coupled`` or ``rejection``.
        controller: The controller and its options, or None for plain decoding.
        width: Number of nodes in a level of the draft tree. A tree of width 1 is a chain.
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
    """A run of one prompt (given by its id) in one configuration (given by its index).

    Attributes:
        rounds: The number of rounds of each shape, as [draft steps, drafted nodes, number of
            rounds].
        host_seconds: The part of the decode time that was spent outside the engines.
        offered: Number of draft tokens that were judged at depth 1, 2, ... A token is judged if all
            tokens before it were accepted.
        accepted: Number of draft tokens that were accepted at depth 1, 2, ...
        guard_rests: Number of times that the guard paused drafting.
        equal: Whether the tokens equal those of plain decoding. It is None with rejection sampling,
            which promises only the same distribution.
        divergence: If the tokens are not equal, the index of the first different token.
        logit_gap: If the tokens are not equal, the difference between two logits of the verifier at
            that index. It is the logit of the token of plain decoding minus the logit of the token
            of the drafting run.
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
    """The seconds of a round's calls. They were measured after one prompt with trees of one width.

    Attributes:
        draft: Seconds of all draft steps of a round for each number of steps, as [[steps, seconds],
            ...].
        verify: Seconds of the verify pass for each number of nodes, as [[nodes, seconds], ...].
    """

    engine: str
    prompt: str
    width: int
    draft: list[list[float]]
    verify: list[list[float]]


@dataclass(frozen=True)
class Tuning:
    """The candidate settings of a controller, as measured on the tuning prompts.

    Attributes:
        seconds: For each candidate, the decode seconds of all tuning prompts together.
        acceptance: For each candidate, the numbers of [accepted, judged] tokens at depth 1, 2, ...
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
        """The last candidate. For ``fixed``, it is the longest length."""
        return list(self.seconds)[-1]


def _values(item: Any) -> Any:
    """Return a dataclass as JSON values."""
    return item.to_dict() if hasattr(item, "to_dict") else asdict(item)


def refuse_existing(*paths: Path) -> None:
    """Raise :class:`EESDError` if one of these files exists."""
    if path := next(filter(Path.exists, paths), None):
        raise EESDError(
            f"{path} exists; give --overwrite, --resume if the command has it, or another --output."
        )


class Saved:
    """A dataclass that is stored as a JSON file. The file has a line for each item of the
    dataclass's lists."""

    WHAT: ClassVar[str]
    """The name of the kind of file. Error messages show it."""
    ROWS: ClassVar[Mapping[str, Callable[..., Any]]]
    """Maps the name of each list of dataclasses to the function that makes an item from its values.
    Every file of this kind has all these lists."""
    SAME: ClassVar[Sequence[str]] = ("options", "machine")
    """Attributes that a resumed run must have in common with the file."""
    schema: int

    def save(self, path: Path) -> None:
        """Write the file atomically. Each item of its lists (a dataclass or a dict) gets a line."""
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
        """Read a file that :meth:`save` wrote. Raises :class:`EESDError` if the file is of another
        kind or has another schema."""
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
        """Return the result to continue. If ``resume`` is True and the file at ``path`` exists, it
        is the result in that file. In all other cases it is this result.

        Raises:
            EESDError: The file exists but may be neither resumed nor overwritten, or an attribute
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
                    f"{path} cannot be resumed, because the {what} changed; use --overwrite."
                )
        return found

    @classmethod
    def wrote(cls, raw: Any) -> bool:
        """Return whether a JSON value is a file of this kind. The file may be damaged."""
        return isinstance(raw, dict) and next(iter(cls.ROWS)) in raw


@dataclass
class Result(Saved):
    """Everything that one benchmark measured.

    Attributes:
        kind: Always ``run``, except that older results that compare exit heads have ``ablation``.
        options: The :class:`~eesd.bench.measure.run.Options`.
        engines: The description of each engine directory by name. The directories are in the order
            in which they were measured.
        prompts: The reported prompts. Each has its id, its task, and its number of tokens.
        machine: Description of the machine.
        tunings: Tuned controllers.
        configurations: The ways to decode. ``Run.configuration`` is an index into this list.
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
        """Return whether this prompt was measured on this engine."""
        return any(
            run.prompt == prompt and self.configurations[run.configuration].engine == engine
            for run in self.runs
        )

    def index_of(self, configuration: Configuration) -> int:
        """Return the index of a configuration. If the configuration is new, it is added."""
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
    """Sum up the [accepted, judged] tokens at each depth over all runs. Each run is given as its
    (accepted, judged) counts, which are lists by depth."""
    total: list[list[int]] = []
    for accepted, judged in runs:
        total += [[0, 0] for _ in range(len(judged) - len(total))]
        for sums, *counts in zip(total, accepted, judged, strict=False):
            sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
    return total


def rounded(value: Any) -> Any:
    """Round every float of a JSON value to 7 decimals, which is a tenth of a microsecond. More
    digits would be noise, and would double the size of the file."""
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def read_json(path: Path) -> Any:
    """Return the JSON value of a file that eesd-bench wrote. Raises :class:`EESDError` if the file
    is not JSON."""
    return json_input.read_json(path, "give a file that eesd-bench wrote")
