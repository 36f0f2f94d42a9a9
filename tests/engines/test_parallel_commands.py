"""The commands in a process for each rank: the tokens of one process, and how all of them end."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.serving import eventually
from support.started_ranks import codes, started

import eesd
from eesd.runtime.cli import main as run_main
from eesd.serve.cli import main as serve_main

PROMPT = "for i in range"
COUNT = 20
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
)
LOST = "error: Rank {} has ended; see what it printed, and start all again.\n"


@pytest.mark.slow
def test_torchrun_prints_the_text_of_one_process(engine: Path) -> None:
    """Once. Standard input is rank 0's."""
    options = ("--engine-dir", engine, "-n", COUNT, "--json")
    command = [
        *TORCHRUN,
        sys.executable,
        "-m",
        "eesd.runtime.cli",
        *map(str, options),
        "--backend",
        "torch",
    ]
    done = subprocess.run(command, input=PROMPT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [line] = done.stdout.splitlines()
    assert (
        json.loads(line)["tokens"]
        == json.loads(succeed(run_main, *options, "-p", PROMPT).stdout)["tokens"]
    )


@contextmanager
def serving(engine: Path, folder: Path) -> Iterator[tuple[list["subprocess.Popen[bytes]"], str]]:
    """The server in two ranks, and its URL."""
    options = ("--engine-dir", engine, "--port", 0, "--backend", "torch", "--drain-seconds", 300)
    with started(folder, "-m", "eesd.serve.cli", *options) as ranks:
        log = folder / "0.err"
        eventually(lambda: "on http" in log.read_text() or ranks[0].poll() is not None, 120)
        found = re.search(r"on (http://[\d.:]+)", log.read_text())
        assert found, log.read_text()
        yield ranks, found[1]


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_server_ends_with_its_ranks(engine: Path, tmp_path: Path, number: signal.Signals) -> None:
    """All get the signal, as from torchrun or a terminal. The request that runs is finished, with
    the tokens of one process."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with serving(engine, tmp_path) as (ranks, url), httpx2.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            chunks = [next(lines)]
            for rank in ranks:
                rank.send_signal(number)
            chunks += lines
        assert codes(ranks) == [0, 0]
    values = [json.loads(line[6:]) for line in chunks if line.startswith("data: {")]
    text = "".join(value["choices"][0]["text"] for value in values)
    assert text == eesd.load(engine).generate(PROMPT, max_new_tokens=16, ignore_eos=True).text
    assert [(tmp_path / name).read_text() for name in ("0.out", "1.out", "1.err")] == [""] * 3
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_loses_a_rank_ends_with_one_sentence(
    engine: Path, tmp_path: Path, lost: int
) -> None:
    """Also while no request runs."""
    with serving(engine, tmp_path) as (ranks, _):
        before = (tmp_path / f"{1 - lost}.err").read_text()
        ranks[lost].kill()
        assert ranks[1 - lost].wait(60) == 1
    assert (tmp_path / f"{1 - lost}.err").read_text() == before + LOST.format(lost)


@pytest.mark.slow
def test_interrupted_in_the_middle_all_ranks_end(engine: Path, tmp_path: Path) -> None:
    options = (
        "--engine-dir",
        engine,
        "-n",
        10**6,
        "--ignore-eos",
        "--backend",
        "torch",
        *["-p", PROMPT] * 1000,
    )
    with started(tmp_path, "-m", "eesd.runtime.cli", *options) as ranks:
        eventually(lambda: (tmp_path / "0.out").stat().st_size > 0, 120)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        assert codes(ranks) == [130, 0]
    assert (tmp_path / "1.out").read_text() == (tmp_path / "1.err").read_text() == ""
    assert "Traceback" not in (tmp_path / "0.err").read_text()


@pytest.mark.parametrize("backend", ["auto", "ort", "tensorrt"])
def test_other_backends_are_refused(
    engine: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Every rank would do the same work."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("WORLD_SIZE is 2", f"not {backend}", "choose the backend torch")
    assert_refused(
        run(run_main, "--engine-dir", engine, "-p", PROMPT, "--backend", backend), *words
    )
    assert_refused(
        run(serve_main, "--engine-dir", engine, "--port", 0, "--backend", backend), *words
    )


def test_what_cannot_be_split_is_refused(
    engine: Path, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the ranks wait for each other."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    options = ("-p", PROMPT, "--backend", "torch", "--engine-dir")
    assert_refused(
        run(run_main, *options, engine), "3 ranks do not divide the model's 2 key-value heads"
    )
    staged = export_engine(text_model, tmp_path / "staged", "--stages", 2)
    assert_refused(run(run_main, *options, staged), "without --stages")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(run(run_main, *options, engine), "RANK", "start them with torchrun")
