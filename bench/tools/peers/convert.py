"""One GGUF file in the forms that the peers read: a work directory with a directory for each."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from eesd.bench.tools.peers.contestants import (
    EESD,
    F32,
    GGUF,
    LLAMA_CPP,
    PEERS,
    WORKERS,
    Contestant,
    of_variant,
    python_of,
)
from eesd.bench.tools.peers.process import PeerError, one_line, started
from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole, written_whole
from eesd.common.json_input import read_json_object

RECORD = "work.json"
REMEDY = "make it with: python -m eesd.bench.tools.peers convert"


@dataclass
class Work:
    """A work directory. Its directories are the forms that were made; ``work.json`` records the rest.

    Attributes:
        directory: The work directory.
        model: The GGUF file.
        python: The interpreter that has the peers.
        skipped: By form (``llama.cpp F32``), why it was not made.
    """

    directory: Path
    model: str
    python: str
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the record. Raises :class:`EESDError` if there is none, or it is damaged."""
        try:
            return cls(directory, **read_json_object(directory / RECORD, REMEDY))
        except TypeError:
            raise EESDError(f"{directory / RECORD} is damaged (a value is missing or unknown); {REMEDY}.") from None

    def save(self) -> None:
        """Write the record."""
        record = {name: getattr(self, name) for name in ("model", "python", "skipped")}
        with written_whole(self.directory / RECORD) as temporary:
            temporary.write_text(json.dumps(record, indent=1), "utf-8")

    def form(self, peer: str, group: str) -> Path:
        """Where a form of the model is, if it was made."""
        return self.directory / f"{peer}-{group}"

    def file(self, group: str) -> Path:
        """The GGUF file of a group. Raises :class:`PeerError` if llama.cpp's quantizer did not make it."""
        path = Path(self.model) if group == GGUF else self.form(LLAMA_CPP, group) / "model.gguf"
        if not path.exists():
            raise PeerError(f"llama.cpp {group} is missing, which is the file to read")
        return path.absolute()

    def contestants(self) -> list[Contestant]:
        """All contestants that can run: a directory ``PEER-FORM`` each. Own ones may be added, such as ``EESD-Q4_0-small``."""
        forms = [(peer, path) for peer in (EESD, *PEERS) for path in sorted(self.directory.glob(f"{peer}-*"))]
        return [
            one for peer, path in dict.fromkeys(forms) for one in of_variant(peer, path.name.removeprefix(f"{peer}-"), path)
        ]


def exit_options(exit_head: Path | None, exit_layer: int | None) -> tuple[list[str], list[str]]:
    """Options of ``eesd-export`` for the exit: of the file and its float32 values, and of made types, which no head fits.

    Raises:
        EESDError: Neither is given, or the exit head cannot be read.
    """
    if exit_head is None and exit_layer is None:
        raise EESDError("Give --exit-head or --exit-layer.")
    if exit_head is not None:
        exit_layer = int(read_json_object(exit_head / "exit_head.json", "train the exit head again")["layer"])
    untrained = ["--exit-layer", str(exit_layer)]
    return ["--exit-head", str(exit_head)] if exit_head else untrained, untrained


def convert(
    work: Work, wanted: Sequence[str], exits: tuple[list[str], list[str]], sizes: list[str], seconds: float,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Make every wanted form that is not there, and keep the record.

    ``exits`` is of :func:`exit_options`, ``sizes`` are more options of ``eesd-export``, and ``seconds`` the longest time of one
    conversion.
    """
    for name in wanted:
        peer, group = name.split(" ")
        output = work.form(peer, group)
        if output.exists():
            report(f"{name}: there already")
            continue
        work.skipped.pop(name, None)
        try:
            if peer == EESD:
                _export(work, group, exits, sizes, seconds)
            else:
                source = work.file(GGUF if peer == LLAMA_CPP else group)
                worker = started(python_of(peer, work.python), WORKERS / PEERS[peer].worker, 1, seconds)
                with worker as process, directory_written_whole(output) as temporary:
                    process.ask("convert", model=str(source), output=str(temporary), variant=group)
            report(f"{name}: {directory_bytes(output) / 1e6:.0f} MB")
        except PeerError as error:
            work.skipped[name] = str(error)
            report(f"{name}: skipped; {error}")
        work.save()


def directory_bytes(directory: Path) -> int:
    """Size of all files of a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _export(work: Work, group: str, exits: tuple[list[str], list[str]], sizes: list[str], seconds: float) -> None:
    """Export for EESD with the benchmark's own interpreter, and load it once: the first load writes packed weights.

    Made types are not checked: that takes as long again.
    """
    output, (trained, untrained) = work.form(EESD, group), exits
    if group == F32:
        source, options = Path(work.model), [*trained, "--dtype", "float32", "--quantize", "none"]
    elif group == GGUF:
        source, options = Path(work.model), trained
    else:
        source, options = work.file(group), [*untrained, "--no-check"]
    command = [sys.executable, "-m", "eesd.export.cli", "--model", str(source), "--output", str(output), *options, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"eesd-export: {one_line(done.stderr)}")
    with started(sys.executable, WORKERS / PEERS[EESD].worker, 1, seconds) as process:
        process.ask("load", path=str(output), options={"mode": "plain", "threads": 1})
