"""Starts a command in a process for each rank, as torchrun does. Unlike torchrun, it gives the exit
code of each rank."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_ports


@contextmanager
def started(
    folder: Path, *arguments: object, ranks: int = 2
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Start ``python ARGUMENTS``. The output of rank i goes to ``i.out`` and ``i.err`` in
    ``folder``."""
    [port] = free_ports(1)
    common = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    processes = []
    try:
        for rank in range(ranks):
            own = {
                name: str(value)
                for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()
            }
            with (
                (folder / f"{rank}.out").open("wb") as out,
                (folder / f"{rank}.err").open("wb") as err,
            ):
                command = [sys.executable, *map(str, arguments)]
                # Some scripts import from tests.
                env = os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)}
                processes.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=err, env=env, preexec_fn=_hear_interrupts
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _hear_interrupts() -> None:
    """Restore the default handling of interrupts. A shell starts background jobs with interrupts
    ignored, and their child processes inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def codes(processes: list["subprocess.Popen[bytes]"], seconds: float = 120) -> list[int]:
    """Returns the exit codes of all processes. Each process must end within ``seconds``."""
    return [process.wait(seconds) for process in processes]
