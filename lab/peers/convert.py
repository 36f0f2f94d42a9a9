"""Converts one model to the forms that the peers read. They are in a work directory, and a record
lists successes and failures."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole, written_whole
from eesd.common.json_input import read_json_object
from lab.peers.contestants import EESD, F32, PEERS, VARIANTS, WORKERS, Contestant, of_variant
from lab.peers.process import PeerError, Process, one_line

RECORD = "work.json"
REMEDY = "make it with: python -m lab.peers convert"


@dataclass
class Work:
    """The record of a work directory.

    Attributes:
        model: The GGUF file.
        python: The interpreter that has the peers.
        made: For each variant (such as ``EESD F32``), the seconds of the conversion and the bytes
            of the result.
        skipped: For each missing variant, the reason why it is missing.
    """

    model: str
    python: str
    made: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the record. Raises :class:`EESDError` if the record is missing or damaged."""
        raw = read_json_object(directory / RECORD, REMEDY)
        try:
            return cls(**raw)
        except TypeError:
            raise EESDError(
                f"{directory / RECORD} is damaged (a value is missing or unknown); {REMEDY}."
            ) from None

    def save(self, directory: Path) -> None:
        with written_whole(directory / RECORD) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), "utf-8")

    def contestants(self, directory: Path) -> list[Contestant]:
        """Return all contestants that can run with the forms of the model in the work directory."""
        found = []
        for name in self.made:
            peer, variant = name.split(" ")
            found += of_variant(peer, variant, variant_dir(directory, peer, variant))
        return found


def variant_dir(directory: Path, peer: str, variant: str) -> Path:
    """Return the path of a form of the model in the work directory."""
    return directory / f"{peer}-{variant}"


def directory_bytes(directory: Path) -> int:
    """Return the size of all files of a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def variants() -> list[str]:
    """Return the names of all conversions of a model."""
    return [
        f"{peer} {variant}"
        for variant in VARIANTS
        for peer in PEERS
        if variant != F32 or peer == EESD
    ]


def convert(
    work: Work,
    directory: Path,
    options: list[str],
    wanted: Sequence[str],
    seconds: float,
    report: Callable[[str], None],
) -> None:
    """Make every wanted variant that is missing, and update the record.

    Args:
        work: The record, which is updated and saved.
        directory: The work directory.
        options: Options of ``eesd-export``.
        wanted: Names of the variants in the order of conversion.
        seconds: Longest time of one conversion.
        report: A function that is called with a line for each variant.
    """
    for name in wanted:
        peer, variant = name.split(" ")
        output = variant_dir(directory, peer, variant)
        if name in work.made and output.exists():
            report(f"{name}: there already")
            continue
        work.made.pop(name, None)
        work.skipped.pop(name, None)
        begun = time.monotonic()
        try:
            if peer == EESD:
                _export(work, output, variant, options, seconds)
            else:
                _convert(work, output, peer, variant, seconds)
        except PeerError as error:
            work.skipped[name] = str(error)
            report(f"{name}: skipped; {error}")
        else:
            size = directory_bytes(output)
            work.made[name] = {"seconds": round(time.monotonic() - begun, 1), "bytes": size}
            report(f"{name}: {size / 1e6:.0f} MB in {time.monotonic() - begun:.0f} s")
        work.save(directory)


def _convert(work: Work, output: Path, peer: str, variant: str, seconds: float) -> None:
    # Existing files come from a run that was stopped before it recorded them.
    made = directory_written_whole(output, lambda _: "")
    with (
        closing(Process(work.python, WORKERS / PEERS[peer].worker, 1, seconds)) as process,
        made as temporary,
    ):
        process.ask("convert", model=work.model, output=str(temporary), variant=variant)


def _export(work: Work, output: Path, variant: str, options: list[str], seconds: float) -> None:
    """Export for EESD with the benchmark's own interpreter, and load the result once, because the
    first load writes packed weights."""
    if variant == F32:
        options = ["--dtype", "float32", "--quantize", "none", "--exit-head", "none"]
    command = [
        *(sys.executable, "-m", "eesd.export.cli"),
        *("--model", work.model, "--output", str(output), "--no-check"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"eesd-export: {one_line(done.stderr)}")
    with closing(Process(sys.executable, WORKERS / PEERS[EESD].worker, 1, seconds)) as process:
        process.ask("load", path=str(output), options={"mode": "plain", "threads": 1})
