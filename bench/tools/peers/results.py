"""The result of a comparison: one JSON file with every run, saved after each prompt."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eesd.bench.measure.results import Saved, describe_machine
from eesd.bench.tools.peers.contestants import Contestant


@dataclass(frozen=True)
class Prompt:
    """Token ids to decode behind. Prompts of a ``kind`` have one length."""

    id: str
    kind: str
    tokens: list[int]


@dataclass(frozen=True)
class Load:
    """One contestant in one process: seconds of loading with its imports, and what it took; None where the system does not say.

    Attributes:
        peak_bytes: Largest resident size, over loading and all prompts.
        anonymous_bytes: Anonymous part of the resident size after the last prompt.
        threads: Threads that computed.
    """

    contestant: str
    process: int
    seconds: float
    peak_bytes: int | None = None
    anonymous_bytes: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one contestant in one process: new tokens, and seconds to the first and from it to the last."""

    contestant: str
    process: int
    prompt: str
    first_seconds: float
    decode_seconds: float
    tokens: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second behind the first one; tokens that came with the first one are counted, too."""
        return (len(self.tokens) - 1) / max(self.decode_seconds, 1e-9)


@dataclass(frozen=True)
class Quality:
    """Only in older results: next-token distributions against those in float32, on ``positions`` tokens of held-out text.

    Mean KL(float32 || contestant) in nats, and the share of the positions with the same most likely token.
    """

    contestant: str
    positions: int
    divergence: float
    agreement: float


@dataclass
class Result(Saved):
    """Everything that one comparison measured.

    Attributes:
        options: What was measured.
        model: Its name.
        contestants: The contestants that ran.
        prompts: What was decoded.
        machine: Where it was measured.
        packages: Package and version by peer.
        sizes: Bytes on disk by peer and variant.
        skipped: By contestant or variant, why there are no figures, or not all.
        quality_reference: The contestant that is float32 for :attr:`qualities`.
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
    schema: int = 1

    WHAT: ClassVar = "a comparison with peers; give the JSON file of its run"
    ROWS: ClassVar = {
        "contestants": Contestant, "prompts": Prompt, "qualities": Quality, "loads": Load, "runs": Run
    }  # fmt: skip
