"""Records of rounds: a replay makes the recorded decisions, and notices other ones."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.harness import Harness

from eesd.bench.cli import main as bench_main
from eesd.bench.replay.round_log import replay_rounds
from eesd.common.errors import EESDError
from eesd.runtime.cli import main as run_main
from eesd.runtime.llm import Speculation, load
from eesd.runtime.round_log import log_rounds

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("spec", ["cost-aware-ts", "calibration-ts", "beta-ts", "fixed:k=3"])
@pytest.mark.parametrize("tree", [0, 1, 3])
def test_a_record_replays_alike(harness: Harness, tmp_path: Path, spec: str, tree: int) -> None:
    llm = load(harness.directory, speculation=Speculation(spec, tree), threads=1)
    llm.generate([5, 9, 3], max_new_tokens=30)  # the record begins in the middle
    controller, guard = llm.controller, llm.guard
    with log_rounds(llm, tmp_path / "rounds.jsonl"):
        rounds = sum(llm.generate(prompt, max_new_tokens=40, ignore_eos=True).stats.rounds for prompt in ([5, 9, 3], [7, 1]))
    assert (llm.controller, llm.guard) == (controller, guard)
    replayed, differences = replay_rounds(tmp_path / "rounds.jsonl")
    assert replayed == rounds > 10 and not differences


def test_a_record_without_an_exit_head_replays_alike(harness: Harness, tmp_path: Path) -> None:
    llm = load(harness.directory, speculation=Speculation(drafter="text"), threads=1)
    with log_rounds(llm, tmp_path / "rounds.jsonl"):
        rounds = sum(llm.generate([5, 9, 3] * 3, max_new_tokens=40, ignore_eos=True).stats.rounds for _ in range(3))
    assert replay_rounds(tmp_path / "rounds.jsonl") == (rounds, [])
    kinds = {tuple(json.loads(line)[:2]) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()[1:]}
    assert kinds >= {("text", "chance"), ("text", "count"), ("text", "observe"), ("guard", "record")}


def test_other_decisions_are_shown(harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    llm = load(harness.directory, threads=1)
    with log_rounds(llm, path):
        llm.generate([5, 9, 3], max_new_tokens=60, ignore_eos=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    index, line = next((i, line) for i, line in enumerate(lines[1:], 1) if line[:2] == ["guard", "allows"])
    line[3] = not line[3]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(bench_main, ["replay-rounds", str(path)])
    assert f"line {index + 1}, guard.allows: {line[3]} recorded, {not line[3]} now" in result.output
    assert "1 answers differ" in result.output


def test_eesd_run_records(harness: Harness, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "rounds.jsonl"
    prompts.write_text('{"prompt": [5, 9, 3]}\n')
    options = ["--engine-dir", str(harness.directory), "--prompt-file", str(prompts), "--log-rounds", str(path)]
    result = CliRunner().invoke(run_main, [*options, "--json"])
    assert result.exit_code == 0
    assert replay_rounds(path) == (json.loads(result.stdout)["stats"]["rounds"], [])
    result = CliRunner().invoke(run_main, [*options, "--no-draft"])
    assert result.exit_code == 2 and "--log-rounds needs drafting" in result.output


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "rounds", "format": 9}', '{"kind": "rounds", "format": 1}', '{"kind": "rounds"}\n[1]']
)
def test_what_is_no_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(EESDError, match=r"--log-rounds|record it again"):
        replay_rounds(tmp_path / "x.jsonl")


def test_a_record_needs_a_place_and_drafting(harness: Harness, tmp_path: Path) -> None:
    llm = load(harness.directory, threads=1)
    with pytest.raises(EESDError, match="cannot be written"), log_rounds(llm, tmp_path / "no" / "x"):
        pass
    with pytest.raises(EESDError, match="does not draft"), log_rounds(llm.with_speculation(None), tmp_path / "x"):
        pass
