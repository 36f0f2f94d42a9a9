"""What a process takes that loads an engine directory on the CPU and decodes: seconds until it can, and memory by kind.

    python -m eesd.bench.tools.fresh plans/ --prompt 512 --tokens 100

Each figure is of a process of its own, which has imported nothing before. Memory is read from ``/proc`` of Linux.
"""

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.terminal import Console, Table


@dataclass(frozen=True)
class Footprint:
    """Seconds of the imports, and of ``eesd.load``; bytes in memory at the end.

    Attributes:
        imports, load: Seconds.
        weights: Mapped files of the engine directory and of its packed weights: shared by all processes.
        cache: Pages of the KV cache.
        libraries: Unchanged pages of other mapped files. All processes share them, too.
        rest: Everything else: this process's own.
    """

    imports: float
    load: float
    weights: int
    cache: int
    libraries: int
    rest: int

    @property
    def besides(self) -> int:
        """Bytes besides weights and KV cache."""
        return self.libraries + self.rest


def measure(directory: Path, threads: int | None, prompt: int, tokens: int) -> Footprint:
    """Load a directory and decode in this process, which should have done nothing before."""
    started = time.perf_counter()
    from eesd.runtime.engines.cpu_build import find_build
    from eesd.runtime.llm import load

    imported = time.perf_counter()
    llm = load(directory, "ort", threads=threads)
    loaded = time.perf_counter()
    with llm.session([7] * prompt, max_new_tokens=tokens, ignore_eos=True) as session:
        while session.finish_reason is None:
            session.step()
        address: int = getattr(session.kv_cache, "address", 0)
        build = find_build(directory, llm.manifest)
        weights = tuple(str(place.resolve()) for place in (directory, build) if place)
        sizes = dict.fromkeys(("weights", "cache", "libraries", "rest"), 0)
        for start, stop, file, resident, own in _mappings():
            if start <= address < stop:
                sizes["cache"] += resident
            elif file.startswith(weights):
                sizes["weights"] += resident
            else:
                sizes["libraries"] += resident - own
                sizes["rest"] += own
    return Footprint(imported - started, loaded - imported, **sizes)


def _mappings() -> list[tuple[int, int, str, int, int]]:
    """Of each mapping of this process first and last address, file, and bytes in memory: all, and those it alone has."""
    found = []
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        head, *lines = part.splitlines()
        start, stop = (int(number, 16) for number in head.split()[0].split("-"))
        sizes = {
            name: int(value.split()[0]) << 10 for name, value in (line.split(":", 1) for line in lines[:-1]) if "kB" in value
        }
        found.append((start, stop, " ".join(head.split()[5:]), sizes["Rss"], sizes["Anonymous"]))
    return found


@cli.command()
@click.argument("directory", type=cli.PATH)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: as eesd.load takes]")
@click.option("--prompt", type=click.IntRange(1, 10**6), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", type=click.IntRange(1, 10**6), default=100, show_default=True, help="Tokens that are decoded.")
@click.option("--repeats", type=click.IntRange(0, 1000), default=5, show_default=True, help="Processes. 0: this one, as JSON.")
def main(directory: Path, threads: int | None, prompt: int, tokens: int, repeats: int) -> None:
    """Show what a fresh process takes that loads DIRECTORY on the CPU and decodes: medians."""
    if sys.platform != "linux":
        raise EESDError("eesd.bench.tools.fresh reads /proc, which only Linux has.")
    if not repeats:
        click.echo(json.dumps(asdict(measure(directory, threads, prompt, tokens))))
        return
    command = [sys.executable, "-m", "eesd.bench.tools.fresh", str(directory), "--prompt", str(prompt), "--tokens", str(tokens)]
    command += ["--repeats", "0", *(["--threads", str(threads)] if threads else [])]
    found = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise EESDError(done.stderr.strip().removeprefix("error: ") or "a process failed")
        found.append(Footprint(**json.loads(done.stdout)))
    table = Table("", "", box=None, pad_edge=False)
    for name in ("imports", "load"):
        table.add_row(f"{name}, s", f"{median(getattr(one, name) for one in found):.3f}")
    for name in ("weights", "cache", "libraries", "rest", "besides"):
        words = {"cache": "KV cache", "rest": "own memory", "besides": "besides weights and KV cache"}.get(name, name)
        table.add_row(f"{words}, MB", f"{median(getattr(one, name) for one in found) / 1e6:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
