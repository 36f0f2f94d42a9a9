"""Functions that run processes which kill themselves with SIGKILL inside a function. Their child
processes die with them."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_KILL = "import os, signal; kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"


def kill_command(module: str, arrange: str, *arguments: object) -> None:
    """Run a command in a process that dies. ``arrange`` is code that puts the function ``kill`` at
    the place where the process must die."""
    code = f"{_KILL}; {arrange}; from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def killed_at_line(number: int, file: str, action: Callable[[], object]) -> bool:
    """Call a function in a process that dies at the ``number``-th executed line of a module.
    Returns False if the process ended before this line."""
    child = os.fork()
    if child == 0:
        left = number

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != file:
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def hold(path: Path) -> "subprocess.Popen[str]":
    """A process that holds ``path`` open for writing until its stdin is closed."""
    code = (
        "import sys; from pathlib import Path; from eesd.common.files import written_whole\n"
        "with written_whole(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); print('writing', flush=True); sys.stdin.read(); "
        "temporary.write_text('whole')"
    )
    command = [sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


def kill_writer(path: Path) -> None:
    """Kill a process while it is writing ``path``."""
    with hold(path) as process:
        process.kill()
