"""Functions for programs in separate sessions (``start_new_session``). The list of all processes of
a session comes from /proc."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

GONE_SECONDS = 30.0
"""The longest time in seconds that a killed process may take to disappear."""


def processes(session: int) -> list[tuple[int, str]]:
    """Returns the process ids and the command lines of a session, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            state, _, _, leader = path.read_text().rpartition(")")[2].split()[:4]
            if int(leader) == session and state != "Z":
                command = (path.parent / "cmdline").read_bytes().decode(errors="replace")
                found.append((int(path.parent.name), command.replace("\0", " ")))
    return found


def end_session(leader: "subprocess.Popen[bytes]") -> None:
    """Kill a program and all processes of its session, and wait until they are gone."""
    end = time.monotonic() + GONE_SECONDS
    while left := processes(leader.pid):
        assert time.monotonic() < end, left
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    leader.wait()
