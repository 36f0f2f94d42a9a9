"""What a benchmark measured, as one JSON file: everything that reports and plots are made of, run by run."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.runtime import doctor

SCHEMA = 2
LIBRARIES = ("eesd", "numpy", "onnxruntime", "torch", "tokenizers")


@dataclass(frozen=True)
class Configuration:
    """One way to decode: ``controller`` None is plain decoding, ``width`` that of the token tree's levels (1: a chain),
    ``budget`` whether a :class:`~eesd.controllers.tree_budget.TreeBudget` chooses what is verified."""

    engine: str
    sampling: str
    controller: str | None
    width: int
    budget: bool = False


@dataclass(frozen=True)
class Run:
    """One prompt decoded one way.

    ``rounds`` counts rounds by shape: [draft steps, drafted nodes, rounds]. ``offered`` and ``accepted`` are by depth.
    ``equal`` says whether the tokens are those of plain decoding, None where the method promises the distribution alone; if
    not equal, ``divergence`` is the index of the first other token and ``logit_gap`` the verifier's between both.
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
class Sweep:
    """Seconds amid one prompt's text, for trees of one width: of a round's drafts by steps (``draft`` [[steps, seconds], ...])
    and of its verify pass by nodes (``verify`` [[nodes, seconds], ...])."""

    engine: str
    prompt: str
    width: int
    draft: list[list[float]]
    verify: list[list[float]]


@dataclass(frozen=True)
class Tuning:
    """Of each candidate over the tuning prompts: total decode seconds, and [accepted, offered] by depth. And the fastest."""

    engine: str
    sampling: str
    width: int
    controller: str
    seconds: dict[str, float]
    acceptance: dict[str, list[list[int]]]
    chosen: str

    @property
    def longest(self) -> str:
        """The last candidate: of fixed lengths the longest."""
        return list(self.seconds)[-1]


@dataclass
class Result:
    """Everything of one benchmark. ``engines`` describes the engine directories by name, in the order they were measured.

    ``kind`` is ``run`` or ``ablation``. ``prompts`` are those reported: id, task, tokens. ``call_overhead`` is by engine: the
    seconds that our code adds to one call of the raw session, where the backend lets that be measured.
    """

    kind: str
    options: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    prompts: list[dict[str, Any]]
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    call_overhead: dict[str, float] = field(default_factory=dict)
    tunings: list[Tuning] = field(default_factory=list)
    configurations: list[Configuration] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    def done(self, engine: str, prompt: str) -> bool:
        """Whether this prompt was measured on this engine: its runs are kept together or not at all."""
        return any(run.prompt == prompt and self.configurations[run.configuration].engine == engine for run in self.runs)

    def index(self, configuration: Configuration) -> int:
        """The number of a configuration, which is noted if it is new."""
        if configuration not in self.configurations:
            self.configurations.append(configuration)
        return self.configurations.index(configuration)

    def save(self, path: Path) -> None:
        """Write the file whole, a run a line."""
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):
                rows = [json.dumps(row if isinstance(row, dict) else rounded(asdict(row))) for row in value]
                parts.append(f'"{item.name}": [\n' + ",\n".join(rows) + "\n]")
            else:
                parts.append(f'"{item.name}": {json.dumps(value)}')
        with written_whole(path) as temporary:
            temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of :meth:`save`. Raises :class:`EESDError` when it is not one, or of another schema."""
        raw = read_json(path)
        if not isinstance(raw, dict) or "runs" not in raw:
            raise EESDError(f"{path} is not a result of eesd-bench; give the result.json that it wrote.")
        if raw.get("schema") != SCHEMA:
            raise EESDError(f"{path} has schema {raw.get('schema')}, this EESD reads {SCHEMA}; measure again.")
        try:
            rows = {"tunings": Tuning, "configurations": Configuration, "sweeps": Sweep, "runs": Run}
            return cls(**raw | {name: [kind(**row) for row in raw[name]] for name, kind in rows.items()})
        except (KeyError, TypeError):
            raise EESDError(f"{path} is damaged (a value is missing or unknown); measure again.") from None


def rounded(value: Any) -> Any:
    """Seconds to a tenth of a microsecond: digits beyond it are noise and half of the file."""
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises :class:`EESDError` when it holds none."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise EESDError(f"{path} is not JSON; give a file that eesd-bench wrote.") from None


def describe_machine() -> dict[str, str]:
    """Processor, cores that this process may use, GPU, memory, system and library versions."""
    facts = doctor.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "CPU": _cpu_model(),
        "cores": f"{cores} cores ({', '.join(doctor.cpu_features())})",
        "memory": facts["memory"],
        "GPU": facts["GPU"],
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "libraries": ", ".join(f"{name} {found}" for name in LIBRARIES if (found := doctor.installed(name))),
    }


def _cpu_model() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = ()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
