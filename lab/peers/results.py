"""The result of a comparison. It is one JSON file that has every run. The file is saved after each
round, so that the comparison can be resumed."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eesd.bench.measure.results import Saved, describe_machine
from lab.peers.contestants import Contestant

SCHEMA = 2


@dataclass(frozen=True)
class Prompt:
    """A prompt and the options of its continuation.

    Attributes:
        id: A name that is unique in a run.
        kind: Its column in the tables.
        tokens: Token ids.
        count: Number of tokens to generate.
        temperature: The temperature. A temperature of 0 decodes greedily.
    """

    id: str
    kind: str
    tokens: list[int]
    count: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Load:
    """One contestant in one process.

    Attributes:
        contestant: Its name.
        process: Number of the process.
        seconds: Seconds that loading took. They include the import of the contestant's libraries.
        peak_bytes: Largest resident size while loading and decoding all prompts. None if the system
            does not report it.
        anonymous_bytes: The anonymous part of the resident size after the last prompt. None if the
            system does not report it.
        threads: Number of threads that computed. None if the system does not report their times.
    """

    contestant: str
    process: int
    seconds: float
    peak_bytes: int | None = None
    anonymous_bytes: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Run:
    """A run of one prompt, which one contestant decoded in one process.

    Attributes:
        contestant: Its name.
        process: Number of the process.
        prompt: Id of the prompt.
        first_seconds: Time to the first token.
        decode_seconds: Time from the first token to the last.
        tokens: The new tokens.
    """

    contestant: str
    process: int
    prompt: str
    first_seconds: float
    decode_seconds: float
    tokens: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second after the first token. Tokens that came with the first token are
        counted as well."""
        return (len(self.tokens) - 1) / max(self.decode_seconds, 1e-9)


@dataclass(frozen=True)
class Quality:
    """The quality of one contestant. Its next-token distributions are compared with the float32
    distributions on held-out text.

    Attributes:
        contestant: Its name.
        positions: Positions compared.
        divergence: Mean of KL(float32 || contestant) in nats.
        agreement: Share of the positions at which both have the same most likely token.
    """

    contestant: str
    positions: int
    divergence: float
    agreement: float


@dataclass
class Result(Saved):
    """Everything that one comparison measured.

    Attributes:
        options: Measurements that were made.
        model: Name of the file.
        contestants: The contestants that ran.
        prompts: Prompts that were decoded.
        machine: Description of the machine.
        packages: The package and the version of each peer.
        sizes: The bytes on disk of each peer and variant.
        skipped: The reason why figures are missing, for each contestant or variant.
        quality_reference: The float32 contestant with which :attr:`qualities` compare.
        qualities, loads, runs: The measurements.
        complete: Whether everything was measured.
        schema: Version of the file format.
    """

    options: dict[str, Any]
    model: dict[str, Any]
    contestants: list[Contestant]
    prompts: list[Prompt]
    machine: dict[str, str] = field(default_factory=describe_machine)
    packages: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    quality_reference: str | None = None
    qualities: list[Quality] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    def has_round(self, process: int, prompt: str, names: set[str]) -> bool:
        """Return whether all of these contestants have decoded this prompt in this process."""
        return names <= {
            run.contestant for run in self.runs if (run.process, run.prompt) == (process, prompt)
        }

    SAME: ClassVar = ("options", "model", "contestants", "prompts", "machine")
    WHAT: ClassVar = "a comparison with peers; give the results.json of its run"
    ROWS: ClassVar[dict[str, type]] = {
        "contestants": Contestant,
        "prompts": Prompt,
        "qualities": Quality,
        "loads": Load,
        "runs": Run,
    }
