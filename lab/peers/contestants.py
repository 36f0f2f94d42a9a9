"""Who takes part: runtimes, the forms of a model that each reads, and the ways in which each
decodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from eesd.common.errors import EESDError

F32 = "F32"
GGUF = "gguf"
TYPES = (
    "Q4_0",
    "Q4_1",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "Q2_K",
    "Q3_K_M",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "F16",
    "BF16",
)
"""Types of GGUF files that llama.cpp's quantizer writes."""
GROUPS = (GGUF, *TYPES, F32)
"""Forms of a model, each a file; ``gguf`` is the file that was given. Contestants of a group read
one file, or the nearest form of it. They run side by side, and are compared with EESD's plain
decoding in that group."""
EESD = "EESD"
LLAMA_CPP = "llama.cpp"
IK_LLAMA_CPP = "ik_llama.cpp"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Peer:
    """A runtime.

    Attributes:
        worker: Its file in ``workers/``.
        modes: Ways to decode besides plainly.
        extra: Variants besides one for each group, and the group of each.
    """

    worker: str
    modes: tuple[str, ...]
    extra: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    LLAMA_CPP: Peer("llama_cpp_peer.py", ("lookup",)),
    EESD: Peer("eesd_peer.py", ("drafting",)),
    IK_LLAMA_CPP: Peer("ik_llama_cpp_peer.py", ("rtr", "lookup")),
    "OpenVINO": Peer("openvino_peer.py", ("lookup",)),
    "ort-genai": Peer("ort_genai_peer.py", ("lookup",), extra={f"{GGUF}-int8": GGUF}),
}
"""llama.cpp comes first: its quantizer makes the files that the others read."""


@dataclass(frozen=True)
class Contestant:
    """One runtime with one form of the model and one way to decode.

    Attributes:
        peer: Key of :data:`PEERS`.
        variant: Form of the model; of EESD the name of an engine directory.
        mode: ``plain``, or a mode of the peer; of EESD also the name of CPU kernels, with which it
            decodes plainly.
        group: Of :data:`GROUPS`.
        path: What the worker loads.
    """

    peer: str
    variant: str
    mode: str
    group: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.peer} {self.variant}" + ("" if self.mode == "plain" else f", {self.mode}")

    @property
    def worker(self) -> Path:
        return WORKERS / PEERS[self.peer].worker

    @property
    def is_plain(self) -> bool:
        return self.mode == "plain"


def of_variant(peer: str, variant: str, group: str, path: Path) -> list[Contestant]:
    """The contestants of one form of the model: plain first. The made types are only decoded
    plainly."""
    modes = PEERS[peer].modes if group in (F32, GGUF) else ()
    return [Contestant(peer, variant, mode, group, str(path)) for mode in ("plain", *modes)]


def group_of(variant: str) -> str:
    """The group of an engine directory's name, which begins with it. Raises :class:`EESDError` for
    other names."""
    group = variant.partition("-")[0]
    if group not in GROUPS:
        raise EESDError(
            f"--eesd {variant!r} begins with no group; name it {', '.join(GROUPS)}, or such "
            "as Q4_0-small."
        )
    return group


def chosen(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The names that one of the patterns matches (``*`` stands for any text); all without patterns.

    Raises:
        EESDError: A pattern matches nothing.
    """
    names = [*names]
    patterns = [*patterns]
    if unknown := next(
        (pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)),
        None,
    ):
        raise EESDError(f"--only {unknown!r} matches none of: {'; '.join(names)}.")
    return {
        name
        for name in names
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def anchors(contestants: Iterable[Contestant]) -> dict[str, Contestant]:
    """By group, the contestant that the others are compared with: EESD's first plain one."""
    found: dict[str, Contestant] = {}
    for contestant in contestants:
        if contestant.peer == EESD and contestant.is_plain:
            found.setdefault(contestant.group, contestant)
    return found


def grouped(contestants: Iterable[Contestant]) -> dict[str, list[Contestant]]:
    """The contestants by group, in their order."""
    found: dict[str, list[Contestant]] = {}
    for contestant in contestants:
        found.setdefault(contestant.group, []).append(contestant)
    return found
