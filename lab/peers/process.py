"""A contestant's process, which answers requests over a pipe, and its memory."""

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from eesd.common.errors import EESDError
from lab.peers.contestants import WORKERS

BUSY_SHARE = 0.25
"""A thread counts as computing if it takes at least this share of the busiest thread's processor
time. Other threads wait, or count tokens."""
SHOWN = 300
"""Maximum number of characters of a library's error that are shown."""


class PeerError(EESDError):
    """A peer is missing, failed, or gave no answer. Other peers go on."""


class Process:
    """One ``workers/serve.py``. Between requests, the process waits for its pipe."""

    def __init__(self, python: Path | str, worker: Path, threads: int, seconds: float) -> None:
        """Start the process.

        Args:
            python: The interpreter that has the peer.
            worker: The peer's file.
            threads: Number of CPU threads. It is for libraries that read the number from the
                environment.
            seconds: Longest time for an answer.

        Raises:
            PeerError: The interpreter cannot be started.
        """
        self.seconds = seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        count = str(threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "HF_HUB_OFFLINE": "1",
        }
        try:
            self._process = subprocess.Popen(
                [python, str(WORKERS / "serve.py"), str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{python} cannot be started ({error.strerror}).") from None

    def package(self) -> str:
        """Return the peer's package and the version of the package."""
        answer = self.ask("hello")
        return f"{answer['package']} {answer['version']}"

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """Send a request and wait for the answer. Raises :class:`PeerError` if the answer is an
        error, or if no answer comes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        late = Timer(self.seconds, self._process.kill)
        late.start()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({"op": op, **values}) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            in_time = late.is_alive()
            late.cancel()
        if not line:
            what = (
                f"{op}: ended" if in_time else f"{op}: no answer within {self.seconds:.0f} seconds"
            )
            raise PeerError(f"{what}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{op}: {one_line(answer['error'])}")
        return answer

    def memory(self) -> dict[str, int]:
        """Return the bytes of the largest resident size so far, and of the current anonymous part,
        which does not belong to files. The result is empty without Linux."""
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        except OSError:
            return {}
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        wanted = {"peak_bytes": "VmHWM", "anonymous_bytes": "RssAnon"}
        return {
            name: int(values[key].split()[0]) * 1024
            for name, key in wanted.items()
            if key in values
        }

    def thread_seconds(self) -> dict[str, float]:
        """Return the processor time of each living thread so far. The result is empty without
        Linux."""
        found = {}
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with suppress(OSError):  # the thread may have ended
                user, system = path.read_text().rpartition(")")[2].split()[11:13]
                found[path.parent.name] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return found

    def close(self) -> None:
        """End the process. If it still runs after some seconds, it is killed."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        """Return the last line that the process printed, for an error message."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f" ({one_line(last)})" if last else ""


def one_line(text: str) -> str:
    """Return a library's message in one line. A long message is shortened."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= SHOWN else f"{words[:SHOWN]}..."


def busy_threads(before: dict[str, float], now: dict[str, float]) -> int:
    """Return the number of threads that computed between two results of
    :meth:`Process.thread_seconds`."""
    taken = [seconds - before.get(thread, 0.0) for thread, seconds in now.items()]
    return sum(seconds > BUSY_SHARE * max(taken) for seconds in taken)
