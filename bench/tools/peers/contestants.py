"""Who takes part: runtimes, the forms of a model that each reads, and the ways in which each decodes."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from eesd.common.errors import EESDError

F32, GGUF = "F32", "gguf"
TYPES = ("Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K", "Q2_K", "Q3_K_M", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", F32)
"""Types of GGUF files that llama.cpp's quantizer writes."""
GROUPS = (GGUF, *TYPES)
"""Forms of a model, each a file; ``gguf`` is the file that was given. Contestants of a group read one file, or the nearest form
of it. They run side by side, and are compared with EESD's plain decoding in that group."""
EESD, LLAMA_CPP, OPENVINO = "EESD", "llama.cpp", "OpenVINO"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Peer:
    """A runtime: the files in ``workers/`` that decode one text, and many at once; and a way to decode besides plainly."""

    worker: str
    batch_worker: str
    mode: str


PEERS = {
    LLAMA_CPP: Peer("llama_cpp_peer.py", "llama_cpp_server.py", "lookup"),
    EESD: Peer("eesd_peer.py", "eesd_batch.py", "drafting"),
    OPENVINO: Peer("openvino_peer.py", "openvino_batch.py", "lookup"),
}
"""llama.cpp comes first: its quantizer makes the files that the others read."""


@dataclass(frozen=True)
class Contestant:
    """One runtime with one form of the model and one way to decode.

    Attributes:
        peer: Key of :data:`PEERS`.
        variant: Form of the model; of EESD the name of an engine directory.
        mode: ``plain``, or the other mode of the peer.
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
        return f"{self.peer} {self.variant}" + ("" if self.is_plain else f", {self.mode}")

    @property
    def worker(self) -> Path:
        return WORKERS / PEERS[self.peer].worker

    @property
    def is_plain(self) -> bool:
        return self.mode == "plain"


def of_variant(peer: str, variant: str, path: Path) -> list[Contestant]:
    """The contestants of one form of the model, plain first. Made types are only decoded plainly: an exit head fits one file.

    Raises:
        EESDError: The name of the form does not begin with a group.
    """
    group = variant.partition("-")[0]
    if group not in GROUPS:
        raise EESDError(f"{path} begins with no group; name it {', '.join(GROUPS)}, or such as {peer}-Q4_0-small.")
    modes = ("plain", PEERS[peer].mode) if group in (F32, GGUF) else ("plain",)
    return [Contestant(peer, variant, mode, group, str(path)) for mode in modes]


def python_of(peer: str, python: str) -> str:
    """The interpreter of a peer: EESD runs in the benchmark's own."""
    return sys.executable if peer == EESD else python


def chosen(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The names that one of the patterns matches (``*`` stands for any text); all without patterns.

    Raises:
        EESDError: A pattern matches nothing.
    """
    names, patterns = [*names], [*patterns]
    if unknown := next((pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)), None):
        raise EESDError(f"--only {unknown!r} matches none of: {'; '.join(names)}.")
    return {name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)}


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
