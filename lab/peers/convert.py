"""One model in the forms that the peers read, in a work directory, with a record of what was made
and what was not."""

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
from lab.peers.contestants import (
    EESD,
    F32,
    GGUF,
    LLAMA_CPP,
    PEERS,
    WORKERS,
    Contestant,
    group_of,
    of_variant,
)
from lab.peers.process import PeerError, Process, one_line

RECORD = "work.json"
REMEDY = "make it with: python -m lab.peers convert"


@dataclass
class Work:
    """The record of a work directory.

    Attributes:
        model: The GGUF file.
        python: The interpreter that has the peers.
        exit_layer: Layers before the exit.
        made: By variant (``llama.cpp F32``): seconds of the conversion, bytes of the result.
        skipped: By variant, why it was not made.
    """

    model: str
    python: str
    exit_layer: int
    made: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the record. Raises :class:`EESDError` if there is none, or it is damaged."""
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

    def contestants(self, directory: Path, engines: dict[str, Path]) -> list[Contestant]:
        """Everybody that can run.

        Args:
            directory: The work directory.
            engines: Engine directories of EESD by name; none for those in the work directory.
        """
        made = [tuple(name.split(" ")) for name in self.made]
        own = engines or {
            variant: variant_dir(directory, EESD, variant) for peer, variant in made if peer == EESD
        }
        found = [
            c
            for variant, path in own.items()
            for c in of_variant(EESD, variant, group_of(variant), path)
        ]
        for peer, variant in made:
            if peer != EESD:
                found += of_variant(
                    peer, variant, group_of(variant), variant_dir(directory, peer, variant)
                )
        return found


def variant_dir(directory: Path, peer: str, variant: str) -> Path:
    """Where the work directory has a form of the model."""
    return directory / f"{peer}-{variant}"


def directory_bytes(directory: Path) -> int:
    """Size of all files of a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def variants(types: Sequence[str]) -> list[str]:
    """All conversions of a model, in order: float32, which judges the quality; the file itself;
    files of other types."""
    groups = [F32, GGUF, *types]
    found = [f"{name} {group}" for group in groups for name in PEERS]
    return found + [
        f"{name} {extra}"
        for name, peer in PEERS.items()
        for extra, of in peer.extra.items()
        if of in groups
    ]


def exit_layer(given: int | None, exit_head: Path | None) -> tuple[int, list[str]]:
    """Layers before the exit, and the options that ``eesd-export`` needs for it."""
    if given is not None:
        return given, ["--exit-layer", str(given)]
    if exit_head is None:
        raise EESDError("The file has no exit head; give --exit-head or --exit-layer.")
    return int(
        read_json_object(exit_head / "exit_head.json", "train the exit head again")["layer"]
    ), [
        "--exit-head",
        str(exit_head),
    ]


def convert(
    work: Work,
    directory: Path,
    head: list[str],
    sizes: list[str],
    wanted: Sequence[str],
    seconds: float,
    report: Callable[[str], None],
) -> None:
    """Make every wanted variant that is not there, and keep the record.

    Args:
        work: The record, which is updated and saved.
        directory: The work directory.
        head, sizes: Options of ``eesd-export`` for the exit head, and others.
        wanted: Names of variants, in order.
        seconds: Longest time of one conversion.
        report: Called with a line for each variant.
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
                _export(work, directory, variant, head, sizes, seconds)
            else:
                source = (
                    Path(work.model) if peer == LLAMA_CPP else file_of(work, directory, variant)
                )
                _convert(source, output, peer, variant, work.python, seconds)
        except PeerError as error:
            work.skipped[name] = str(error)
            report(f"{name}: skipped; {error}")
        else:
            size = directory_bytes(output)
            work.made[name] = {"seconds": round(time.monotonic() - begun, 1), "bytes": size}
            report(f"{name}: {size / 1e6:.0f} MB in {time.monotonic() - begun:.0f} s")
        work.save(directory)


def file_of(work: Work, directory: Path, variant: str) -> Path:
    """The GGUF file of a variant: the given one, or what llama.cpp's quantizer made of it."""
    if group_of(variant) == GGUF:
        return Path(work.model)
    path = variant_dir(directory, LLAMA_CPP, variant) / "model.gguf"
    if not path.exists():
        raise PeerError(f"llama.cpp {variant} is missing, which is the file to read")
    return path.absolute()


def _convert(
    source: Path, output: Path, peer: str, variant: str, python: str, seconds: float
) -> None:
    # What is there comes from a run that was stopped before it said so.
    made = directory_written_whole(output, lambda _: "")
    with (
        closing(Process(python, WORKERS / PEERS[peer].worker, 1, seconds)) as process,
        made as temporary,
    ):
        process.ask("convert", model=str(source), output=str(temporary), variant=variant)


def _export(
    work: Work, directory: Path, variant: str, head: list[str], sizes: list[str], seconds: float
) -> None:
    """Export for EESD with the benchmark's own interpreter, and load it once: the first load writes
    packed weights.

    The given exit head fits the file as it is, and its values in float32; other types get an
    untrained one.
    """
    output = variant_dir(directory, EESD, variant)
    if variant == F32:
        source = work.model
        options = [*head, "--dtype", "float32", "--quantize", "none"]
    elif variant == GGUF:
        source = work.model
        options = head
    else:
        source = str(file_of(work, directory, variant))
        options = ["--exit-layer", str(work.exit_layer)]
    # The export of a whole model is checked, those of its quantizations are not: that takes as long
    # again.
    if group_of(variant) not in (F32, GGUF):
        sizes = [*sizes, "--no-check"]
    command = [
        sys.executable,
        "-m",
        "eesd.export.cli",
        "--model",
        source,
        "--output",
        str(output),
        *options,
        *sizes,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"eesd-export: {one_line(done.stderr)}")
    with closing(Process(sys.executable, WORKERS / PEERS[EESD].worker, 1, seconds)) as process:
        process.ask("load", path=str(output), options={"mode": "plain", "threads": 1})
