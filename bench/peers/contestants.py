"""Who takes part: runtimes, the forms of a checkpoint that each reads, and the ways in which each decodes."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from eesd.common.errors import EESDError

GGUF = "gguf"
GROUPS = ("float32", "int8", "int4", GGUF)
"""Contestants of a group run side by side, and are compared with EESD's plain decoding in that group.
Those of GGUF read one file, or the nearest form of it."""
EESD = "EESD"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Peer:
    """A runtime.

    Attributes:
        worker: Its file in ``workers/``.
        variants: Its forms of a checkpoint, and the group of each.
        modes: Ways to decode besides plainly, and the variants that are run so; none for all variants.
        install: What to install in the peers' environment.
        converts: Whether it needs the checkpoint in a form of its own.
    """

    worker: str
    variants: dict[str, str]
    modes: dict[str, tuple[str, ...]]
    install: str
    converts: bool = True


PEERS = {
    EESD: Peer("eesd_peer.py", {group: group for group in GROUPS}, {"drafting": ()}, "eesd[export]"),
    "llama.cpp": Peer(
        "llama_cpp_peer.py",
        {"F32": "float32", "Q8_0": "int8", "Q4_0": "int4", "Q4_K_M": "int4", GGUF: GGUF},
        {"lookup": ("F32", "Q8_0", "Q4_0", GGUF)},
        "llama-cpp-python gguf torch safetensors",
    ),
    "OpenVINO": Peer(
        "openvino_peer.py",
        {"fp32": "float32", "int8": "int8", "int4": "int4", GGUF: GGUF},
        {"lookup": ()},
        "openvino-genai",
    ),
    "ort-genai": Peer(
        "ort_genai_peer.py",
        {"fp32": "float32", "int8": "int8", "int4": "int4", GGUF: GGUF, f"{GGUF}-int8": GGUF},
        {"lookup": ()},
        "onnxruntime-genai onnx-ir torch transformers gguf",
    ),
    "transformers": Peer(
        "transformers_peer.py",
        {"fp32": "float32", "bf16": "float32"},
        {"lookup": ("fp32",), "early-exit": ("fp32",)},
        "transformers torch",
        converts=False,
    ),
}


@dataclass(frozen=True)
class Contestant:
    """One runtime with one form of the checkpoint and one way to decode.

    Attributes:
        peer: Key of :data:`PEERS`.
        variant: Form of the checkpoint; of EESD the name of an engine directory.
        mode: ``plain``, or a mode of the peer.
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
    """The contestants of one form of the checkpoint: plain first."""
    modes = [mode for mode, variants in PEERS[peer].modes.items() if not variants or variant in variants]
    return [Contestant(peer, variant, mode, group, str(path)) for mode in ("plain", *modes)]


def group_of(variant: str) -> str:
    """The group of an engine directory's name, which begins with it. Raises :class:`EESDError` for other names."""
    group = variant.partition("-")[0]
    if group not in GROUPS:
        raise EESDError(f"--eesd {variant!r} begins with no group; name it {', '.join(GROUPS)}, or such as int4-small.")
    return group


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
