"""``manifest.json``: what an engine directory holds. The one contract between exporting and running; needs no torch."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eesd.runtime.errors import EESDError

FORMAT_VERSION = 1
NAME = "manifest.json"
WEIGHTS = "weights.bin"


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape (``B``, ``n`` and ``S`` are symbolic) and element type of a graph's input or output."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class GraphInfo:
    """One graph: its file, its tensors, and which of the L + E caches it reads and writes, in input order."""

    file: str
    caches: tuple[int, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of a file of the directory."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime must know about an engine directory."""

    format_version: int
    model: str
    architecture: str
    base_fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    exit_layer: int
    exit_blocks: int
    exit_trained: bool
    dtype: str
    max_seq_len: int
    max_tree_nodes: int
    draft_top_k: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    draft: GraphInfo
    verify: GraphInfo
    files: dict[str, FileInfo]
    tools: dict[str, str]

    @property
    def num_caches(self) -> int:
        """L + E: one key and one value cache for each base layer and each exit block."""
        return self.num_layers + self.exit_blocks

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, read in pieces; ``progress`` is told the bytes of each."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read and check a directory's manifest and that every file it names is there in its full size.

    Raises :class:`EESDError` when the directory is no engine directory, is damaged, or is of another format version.
    """
    path = directory / NAME
    if not directory.is_dir():
        raise EESDError(f"{directory} is not a directory; give the output directory of eesd-export.")
    if not path.exists():
        raise EESDError(f"{directory} has no {NAME}; give the output directory of eesd-export.")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise EESDError(f"{path} is not valid JSON; export the model again.") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version is None:
        raise EESDError(f"{path} is not an EESD manifest; give the output directory of eesd-export.")
    if version != FORMAT_VERSION:
        raise EESDError(
            f"{path} has format version {version}, this EESD reads version {FORMAT_VERSION}; export the model again."
        )
    try:
        manifest = _parse(raw)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EESDError(f"{path} is damaged (a field is missing or has the wrong type); export the model again.") from None
    for name, info in manifest.files.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != info.size:
            raise EESDError(
                f"{file} has {file.stat().st_size} bytes where the manifest says {info.size}; export the model again."
            )
    return manifest


def verify_files(directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Hash every file again; :class:`EESDError` names the first that was changed after the export."""
    for name, info in manifest.files.items():
        if sha256_of(directory / name, progress) != info.sha256:
            raise EESDError(f"{directory / name} was changed after the export (its SHA-256 differs); export the model again.")


def _parse(raw: Mapping[str, Any]) -> Manifest:
    fields = dict(raw)
    fields["eos_token_ids"] = tuple(int(token) for token in raw["eos_token_ids"])
    fields["files"] = {name: FileInfo(**info) for name, info in raw["files"].items()}
    for graph in ("draft", "verify"):
        info = raw[graph]
        fields[graph] = GraphInfo(
            file=str(info["file"]),
            caches=tuple(int(index) for index in info["caches"]),
            inputs=tuple(_tensor(tensor) for tensor in info["inputs"]),
            outputs=tuple(_tensor(tensor) for tensor in info["outputs"]),
        )
    for name in (
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "max_seq_len",
        "max_tree_nodes",
        "exit_blocks",
    ):
        if not isinstance(raw[name], int) or raw[name] < 1:
            raise ValueError(name)
    return Manifest(**fields)


def _tensor(raw: Mapping[str, Any]) -> TensorInfo:
    return TensorInfo(str(raw["name"]), tuple(raw["shape"]), str(raw["dtype"]))
