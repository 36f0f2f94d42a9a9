"""The contestants. They are runtimes, and the ways in which each runtime decodes one GGUF file."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from eesd.common.errors import EESDError

GGUF = "gguf"
F32 = "F32"
VARIANTS = (GGUF, F32)
"""The forms of a model. They are the given file, and its values in float32. Only EESD has the
float32 form, which is the reference for all distributions."""
EESD = "EESD"
LLAMA_CPP = "llama.cpp"
IK_LLAMA_CPP = "ik_llama.cpp"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Peer:
    """A runtime.

    Attributes:
        worker: The runtime's file in ``workers/``.
        modes: Ways to decode besides plain decoding.
        samples: Whether the runtime is also measured with a temperature.
    """

    worker: str
    modes: tuple[str, ...]
    samples: bool = True


PEERS = {
    EESD: Peer("eesd_peer.py", ("drafting",)),
    LLAMA_CPP: Peer("llama_cpp_peer.py", ("ngram",)),
    IK_LLAMA_CPP: Peer("ik_llama_cpp_peer.py", ("rtr",), samples=False),
    "OpenVINO": Peer("openvino_peer.py", ("lookup",)),
    "ort-genai": Peer("ort_genai_peer.py", ("lookup",)),
}


@dataclass(frozen=True)
class Contestant:
    """A runtime that decodes in one of its ways.

    Attributes:
        peer: Key of :data:`PEERS`.
        variant: One of :data:`VARIANTS`.
        mode: ``plain``, or a mode of the peer. For EESD, it may also be the name of CPU kernels,
            with which EESD decodes plainly.
        path: File or directory that the worker loads.
    """

    peer: str
    variant: str
    mode: str
    path: str

    @property
    def name(self) -> str:
        form = "" if self.variant == GGUF else f" {self.variant}"
        return f"{self.peer}{form}, {self.mode}"

    @property
    def worker(self) -> Path:
        return WORKERS / PEERS[self.peer].worker

    @property
    def is_plain(self) -> bool:
        return self.mode == "plain"

    @property
    def samples(self) -> bool:
        """Whether the contestant is also measured with a temperature."""
        return PEERS[self.peer].samples


def of_variant(peer: str, variant: str, path: Path) -> list[Contestant]:
    """Return the contestants that load one form of the model. Plain decoding comes first."""
    modes = PEERS[peer].modes if variant == GGUF else ()
    return [Contestant(peer, variant, mode, str(path)) for mode in ("plain", *modes)]


def chosen(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match a pattern, in which ``*`` stands for any text. If there are no
    patterns, all names are returned.

    Raises:
        EESDError: A pattern matches nothing.
    """
    names = [*names]
    patterns = [*patterns]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise EESDError(f"--only {pattern!r} matches none of: {'; '.join(names)}.")
    return {
        name
        for name in names
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
