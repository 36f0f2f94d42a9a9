"""Programs in sessions of their own (``start_new_session``), and all that they start: by /proc."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

GONE_SECONDS = 30.0
"""A killed process that is there for longer cannot be killed."""


def processes(session: int) -> list[tuple[int, str]]:
    """Process ids and command lines of a session, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, leader = path.read_text().rpartition(")")[2].split()[:4]
            if int(leader) == session and state != "Z":
                command = (path.parent / "cmdline").read_bytes().decode(errors="replace")
                found.append((int(path.parent.name), command.replace("\0", " ")))
    return found


def end_session(leader: "subprocess.Popen[bytes]") -> None:
    """Kill a program and all that it started, and wait until nothing of it is left."""
    end = time.monotonic() + GONE_SECONDS
    while left := processes(leader.pid):
        assert time.monotonic() < end, left
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    leader.wait()
