"""``eesd-distill`` on a tiny model: it learns, goes on exactly, and what it measures is what the runtime accepts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command import export_engine, succeed
from support.distilling import SMALL, distill, losses, metrics

import eesd
from eesd.distill.acceptance import Validation
from eesd.distill.cli import main
from eesd.distill.data import batch_rows, cut
from eesd.distill.generate import continue_prompts
from eesd.distill.teacher import Teacher
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.llm import Speculation

SHARDED = str(Path(__file__).parent / "support/sharded.py")


@pytest.fixture(scope="session")
def trained(learner: Path, own_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head after 60 steps."""
    output = tmp_path_factory.mktemp("trained") / "head"
    distill(learner, own_rows, output, "--steps", 60, "--lr", 1e-2, "--batch", 16, "--save-every", 60)
    return output


def test_the_head_learns(trained: Path) -> None:
    steps = losses(trained)
    assert np.mean([steps[i] for i in range(51, 61)]) < 0.85 * steps[1]
    checks = [line for line in metrics(trained) if "acceptance" in line]
    assert [line["step"] for line in checks] == [0, 60]
    assert checks[1]["tokens_per_round"] > 1.1 * checks[0]["tokens_per_round"]
    assert checks[1]["acceptance"][0] > checks[0]["acceptance"][0] + 0.05
    assert (trained / "curves.png").stat().st_size > 1000


def test_the_validation_counts_what_the_runtime_accepts(learner: Path, trained: Path, tmp_path: Path) -> None:
    """Rounds replayed from one parallel pass are, offer by offer, those that the engines run."""
    checkpoint = Checkpoint(learner)
    (stored,) = trained.glob("validation-*.safetensors")
    validation = Validation.load(stored)
    found = validation.acceptance(checkpoint.exit_head(trained), checkpoint.config, checkpoint.lm_head(), depth=5)
    llm = eesd.load(
        export_engine(learner, tmp_path / "plans", "--exit-head", trained), speculation=Speculation("fixed:k=5", guard=False)
    )
    offered, accepted, rounds = np.zeros(5, int), np.zeros(5, int), 0
    for tokens, start, end in zip(validation.tokens, validation.starts, validation.ends, strict=True):
        done = llm.generate(tokens[:start].tolist(), max_new_tokens=int(end - start), ignore_eos=True)
        assert done.tokens == tokens[start:end].tolist()
        rounds += done.stats.rounds
        offered[: len(done.stats.offered_at_depth)] += done.stats.offered_at_depth
        accepted[: len(done.stats.accepted_at_depth)] += done.stats.accepted_at_depth
    assert (tuple(offered), tuple(accepted), rounds) == (found.offered, found.accepted, found.rounds)
    untrained = validation.acceptance(
        checkpoint.initial_head(checkpoint.exit_head(trained).exit_config), checkpoint.config, checkpoint.lm_head(), depth=5
    )
    assert found.tokens_per_round > untrained.tokens_per_round


def test_a_killed_run_goes_on_exactly(learner: Path, own_rows: Path, tmp_path: Path) -> None:
    """SIGKILL between two checkpoints: the losses and the head are those of a run that was left alone."""
    options = ("--steps", 24, "--accumulate", 2, "--unroll", 3, "--hidden", 0.5)
    distill(learner, own_rows, tmp_path / "whole", *options)
    arguments = ["--model", learner, "--exit-layer", 1, "--data", own_rows, "-o", tmp_path / "killed", *SMALL, *options]
    command = [sys.executable, "-m", "eesd.distill.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step     12  loss"):
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] != ["checkpoint-24"]
    distill(learner, own_rows, tmp_path / "killed", *options)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "killed")) == list(range(1, 25))
    for name in ("exit_head.safetensors", "checkpoint-24/optimizer.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_cache_gives_the_losses_of_the_teacher_and_needs_none(
    learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--steps", 6, "--hidden", 0.5, "--mix", own_rows)
    distill(learner, own_rows, tmp_path / "online", *options)
    distill(learner, own_rows, tmp_path / "filling", *options, "--offline", tmp_path / "cache")
    monkeypatch.setattr(Checkpoint, "decoder", lambda *_: pytest.fail("the teacher was loaded"))
    distill(learner, own_rows, tmp_path / "cached", *options, "--offline", tmp_path / "cache")
    assert losses(tmp_path / "online") == losses(tmp_path / "filling") == losses(tmp_path / "cached")


def test_self_generation_goes_on_where_it_stopped(learner: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": "abc def"}, {"text": "x = 1"}, {"messages": [{"role": "user", "content": "hi"}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--model", learner, "--exit-layer", 1, "--self-generate", prompts, "-o", tmp_path / "out", *SMALL)
    arguments += ("--own-rows", 40, "--own-batch", 16, "--steps", 2)
    succeed(main, *arguments)
    shards = sorted((tmp_path / "out" / "own-text").glob("shard-*"))
    assert len(shards) == 3
    before = [shard.read_bytes() for shard in shards]
    kept = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    succeed(main, *arguments)
    assert [shard.read_bytes() for shard in shards] == before
    assert shards[0].stat().st_mtime_ns == kept


def test_ragged_prompts_are_continued_as_alone(learner: Path) -> None:
    decoder = Checkpoint(learner).decoder()
    prompts = [[5, 6, 7], [10] * 70, [40, 41]]
    together, ends = continue_prompts(decoder, prompts, 20, torch.zeros(3), torch.Generator(), (2,))
    for row, prompt in enumerate(prompts):
        alone, end = continue_prompts(decoder, [prompt], 20, torch.zeros(1), torch.Generator(), (2,))
        assert together[row, : ends[row]].tolist() == alone[0, : end[0]].tolist()


def test_sampled_continuations_follow_the_model(learner: Path) -> None:
    """2000 first tokens at temperature 1 against the model's distribution."""
    decoder = Checkpoint(learner).decoder()
    count = 2000
    tokens, _ = continue_prompts(decoder, [[5, 6, 7]] * count, 1, torch.ones(count), torch.Generator().manual_seed(3), (2,))
    _, targets = Teacher(decoder, [1], 97, "float32")(torch.tensor([[5, 6, 7]]))
    expected = torch.zeros(97).index_add(0, targets.top_ids[0, -1].long(), targets.top_logprobs[0, -1].float().exp())
    seen = torch.bincount(tokens[:, 3], minlength=97) / count
    assert (seen - expected).abs().max() < 5 * (0.25 / count) ** 0.5


def test_every_row_comes_once_an_epoch_and_a_fixed_part_is_mixed_in() -> None:
    rows = cut([np.arange(20)] * 30, 19)
    mixed = rows.__class__(rows.tokens, rows.lengths, 24)
    drawn = np.concatenate([batch_rows(mixed, 4, 0.25, number, 7) for number in range(16)])
    own, others = drawn[drawn < 24], drawn[drawn >= 24]
    assert len(others) == 16 and sorted(own[:24]) == list(range(24)) == sorted(own[24:48])
    assert sorted(others[:6]) == list(range(24, 30))


@pytest.mark.parametrize("search", [("--search-exit-layer", "1,2"), ("--search-exit-layer", "1", "--search-blocks", "1,2")])
def test_the_search_recommends_an_exit_layer(learner: Path, own_rows: Path, tmp_path: Path, search: tuple[str, str]) -> None:
    result = succeed(main, "--model", learner, "--data", own_rows, "-o", tmp_path, *SMALL, "--steps", 3, *search)
    lines = result.stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4 and "speed-up" in table[0]
    speeds = [float(line.split("|")[-2].strip(" x")) for line in table[2:]]
    assert speeds == sorted(speeds, reverse=True)
    layer, blocks = table[2].split("|")[1:3]
    assert lines[-1].startswith(f"Recommended: --exit-layer {layer.strip()} --blocks {blocks.strip()}")


def test_figures_for_tensorboard(trained: Path) -> None:
    pytest.importorskip("tensorboard")
    assert time.time() - max(path.stat().st_mtime for path in (trained / "events").iterdir()) < 3600


@pytest.mark.slow
@pytest.mark.parametrize("how", [("-m", "eesd.distill.cli"), (SHARDED,)], ids=["copies", "fsdp"])
def test_two_processes_train_as_one_with_their_rows(
    learner: Path, own_rows: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    """Two processes with batches of two rows, stopped and resumed, against one process that passes over the same rows."""
    arguments = ["--model", learner, "--exit-layer", 1, "--data", own_rows, *SMALL]
    arguments += ["--batch", 2, "--accumulate", 2, "--steps", 8]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *how]
    command += [*map(str, arguments), "-o", str(tmp_path / "two"), "--offline", str(tmp_path / "cache")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("step      6  loss"):
            first.terminate()
            break
    first.wait()
    assert not (tmp_path / "two" / "checkpoint-8").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("step      8  loss") == 1 and "step      5  loss" not in done.stdout
    distill(learner, own_rows, tmp_path / "one", "--batch", 2, "--accumulate", 4, "--steps", 8)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
