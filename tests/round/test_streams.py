"""Tests that signals, and standard streams that are closed, full or broken, lead to one sentence or
to the shell's exit codes. They never lead to a traceback."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.command import assert_one_line
from support.engine_dirs import edit_manifest

TOO_LATE = 60


def start(name: str, *arguments: object) -> list[str]:
    """Returns the command line with which a script starts a command."""
    return [
        sys.executable,
        "-c",
        f"from eesd.commands import {name}; {name}()",
        *map(str, arguments),
    ]


def in_shell(redirection: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
    shell = ["bash", "-c", f'"$@" {redirection}', "bash", *command]
    return subprocess.run(
        shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOO_LATE
    )


COMMANDS = ["run", "inspect --json", "doctor", "build -h"]
LOST = [
    (">/dev/full", ("No space left on device", "write to another place")),
    (">&-", ("stdout is closed", "/dev/null")),
    ("<&- >&-", ("stdout is closed",)),
]
OTHERS = ["2>&-", "2>/dev/full", "<&-", "<&- 2>&-"]


@pytest.fixture
def command(request: pytest.FixtureRequest, engine: Path) -> list[str]:
    name, *options = request.param.split()
    inputs = {"run": ("--engine-dir", engine, "-p", "hello", "-n", 3), "inspect": (engine,)}.get(
        name, ()
    )
    return start(name, *inputs, *options)


@pytest.mark.parametrize(
    ("command", "lost"), [*zip(COMMANDS, cycle(LOST), strict=False)], indirect=["command"]
)
def test_lost_output_is_an_error(command: list[str], lost: tuple[str, tuple[str, ...]]) -> None:
    """The test loses the output of each command in only one of the ways. This is enough, because
    all commands open and close streams with the same code."""
    redirection, words = lost
    done = in_shell(redirection, command)
    assert done.returncode == 2
    assert_one_line(done.stderr, *words)


@pytest.mark.parametrize("command", ["run", "inspect --json", "build -h"], indirect=True)
def test_a_broken_pipe_ends_quietly(command: list[str]) -> None:
    done = in_shell(
        "| true; exit ${PIPESTATUS[0]}", ["sh", "-c", 'sleep 0.3; exec "$@"', "sh", *command]
    )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "redirection"), [*zip(COMMANDS, cycle(OTHERS), strict=False)], indirect=["command"]
)
def test_other_streams_do_not_matter(command: list[str], redirection: str) -> None:
    if "--engine-dir" in command and "--json" not in command:
        command = [*command, "--no-stats"]
    done = in_shell(redirection, command)
    assert done.returncode == 0 and done.stdout and not done.stderr


@pytest.mark.parametrize(
    "redirection", ["2>&-", "2>/dev/full", "2>&- >&-", ">/dev/full 2>/dev/full"]
)
def test_an_error_keeps_its_exit_code(redirection: str) -> None:
    assert (
        in_shell(redirection, start("run", "--engine-dir", "/nowhere", "-p", "x")).returncode == 2
    )


def test_statistics_that_are_lost_are_an_error(engine: Path) -> None:
    assert (
        in_shell("2>/dev/full", start("run", "--engine-dir", engine, "-p", "x", "-n", 2)).returncode
        == 2
    )


def test_no_file_takes_the_place_of_a_closed_stream(
    engine: Path, text_model: Path, tmp_path: Path
) -> None:
    """If a file took the place of the stream, output of libraries would end up in the weights."""
    options = (
        "--model",
        text_model,
        "--exit-layer",
        1,
        "--no-check",
        "--no-pack",
        "-o",
        tmp_path / "plans",
    )
    assert in_shell("<&- 2>&-", start("export", *options)).returncode == 0
    assert (tmp_path / "plans" / "weights.bin").read_bytes() == (
        engine / "weights.bin"
    ).read_bytes()


def test_a_closed_stdin_is_no_prompt(engine: Path) -> None:
    for options in ((), ("-p", "-"), ("--chat",)):
        done = in_shell("<&-", start("run", "--engine-dir", engine, *options))
        assert done.returncode == 2
        assert_one_line(done.stderr, "stdin is closed", "--prompt")


def interruptible(line: list[str], **settings: Any) -> subprocess.Popen[str]:
    """Start a process that Ctrl-C and a hang-up end. This works even if these tests run in the
    background, where both signals are ignored."""
    ended_by = (signal.SIGINT, signal.SIGHUP)
    return subprocess.Popen(
        line,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in ended_by],
        **settings,
    )


SLOW = "import sys, time\nprint('here', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(("name", "number"), [("run", signal.SIGINT), ("distill", signal.SIGTERM)])
def test_a_signal_while_python_imports(name: str, number: signal.Signals, tmp_path: Path) -> None:
    """A slow import of click represents all slow imports."""
    (tmp_path / "click.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    pipe = subprocess.PIPE
    with interruptible(
        start(name), stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait(TOO_LATE) == -number  # a shell turns it into 130 and 143
        assert process.stderr.read() == ""


INSIDE = (
    "import time, eesd.runtime.cli as c; c.load = lambda *a, **k: (print('here', flush=True), {0})"
)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_while_a_command_works(number: signal.Signals, code: int) -> None:
    line = [
        sys.executable,
        "-c",
        f"{INSIDE.format('time.sleep(60)')}; from eesd.commands import run; run()",
    ]
    with interruptible(
        [*line, "--engine-dir", "x", "-p", "y"], stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait(TOO_LATE) == code
        assert process.stderr.read().strip() == ""


def test_a_second_interrupt_while_the_first_is_cleaned_up(tmp_path: Path) -> None:
    """The next run removes the files that it leaves."""
    code = (
        "import time, eesd.common.files as f, eesd.runtime.cli as c\n"
        "f._delete = lambda _: (print('cleaning', flush=True), time.sleep(60))\n"
        f"def load(*_, **__):\n with f.written_whole(f.Path({str(tmp_path / 'x')!r})):\n"
        "  print('here', flush=True); time.sleep(60)\n"
        "c.load = load\nfrom eesd.commands import run; run()"
    )
    line = [sys.executable, "-c", code, "--engine-dir", "x", "-p", "y"]
    with interruptible(line, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for expected in ("here\n", "cleaning\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGINT)
        assert process.wait(TOO_LATE) == 130
        assert process.stderr.read().strip() == ""


@pytest.mark.parametrize(
    ("raised", "replaced", "code"),
    [
        ("KeyboardInterrupt", "cli.main = sys.exit", -signal.SIGINT),
        # Python raises this error if an extension module ignores an interrupt.
        ("SystemError from KeyboardInterrupt()", "cli.main", 130),
    ],
    ids=["handled", "ignored"],
)
def test_an_interrupt_while_one_is_handled_or_ignored(
    raised: str, replaced: str, code: int
) -> None:
    program = (  # tests that run in the background inherit that Ctrl-C is ignored
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from eesd import commands\nimport eesd.runtime.cli as cli\n"
        f"def interrupted(*_):\n raise {raised}\n"
        f"{replaced} = interrupted\ncommands.run()"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == code and process.stderr == ""


def test_a_storm_of_interrupts(engine: Path) -> None:
    """After any number of signals at any moment, a command completes, or ends with the shell's exit
    code. It never shows a traceback."""
    for delay in (0.05, 0.5, 1.1, 1.8):
        line = [
            sys.executable,
            "-c",
            "from eesd import commands; print('here', flush=True); commands.run()",
            "--engine-dir",
            str(engine),
            "-p",
            "hello",
            "-n",
            "200",
            "--ignore-eos",
            "--no-stats",
        ]
        with interruptible(line, stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            time.sleep(delay)
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.002)
            assert process.stderr is not None
            assert process.returncode in (130, -signal.SIGINT, 0)
            assert "Traceback" not in process.stderr.read()


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A shell starts background programs with interrupts ignored."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from eesd import commands"
    check = (
        "import eesd.runtime.doctor as d; d.packages = lambda: "
        "(signal.raise_signal(signal.SIGINT), {})[1]"
    )
    line = [sys.executable, "-c", f"{code}; {check}; commands.doctor()", "--json"]
    assert subprocess.run(line, stdout=subprocess.DEVNULL).returncode == 0


def on_terminal(line: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Returns the exit code and the output of a command on a terminal without input."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        line, stdin=other, stdout=other, stderr=other, env=os.environ | (environment or {})
    )
    os.close(other)
    shown = b""
    while select.select([main], [], [], TOO_LATE)[0]:
        try:
            piece = os.read(main, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    try:
        return process.wait(TOO_LATE), shown.decode()
    finally:
        process.kill()


def test_chat_without_a_template_is_refused_before_anybody_types(engine_copy: Path) -> None:
    (engine_copy / "chat_template.jinja").unlink()
    edit_manifest(engine_copy, "files/chat_template.jinja", ...)
    code, shown = on_terminal(start("run", "--engine-dir", engine_copy, "--chat"))
    assert code == 2 and "no chat template" in shown and ">" not in shown


def test_drafts_have_colours_on_a_terminal(engine: Path) -> None:
    """``tests/house/test_terminal.py`` switches colours off."""
    options = (
        "--engine-dir",
        engine,
        "-p",
        "a",
        "-n",
        8,
        "--show-drafts",
        "--controller",
        "fixed:k=2",
        "--no-guard",
    )
    code, shown = on_terminal(start("run", *options), {"TERM": "xterm", "NO_COLOR": ""})
    assert code == 0 and "\x1b[" in shown
