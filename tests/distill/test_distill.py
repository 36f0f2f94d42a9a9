"""Tests of ``eesd-distill`` with a tiny model. They cover training, exact resuming, self-generated
text, validation against the runtime, and the code for GPUs, which runs on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.command import assert_refused, export_engine, run, succeed
from support.distilling import SMALL, distill, end_at, read_losses, read_metrics
from support.engine_dirs import edit_manifest
from support.gguf_files import Spec

import eesd
from eesd.common.architecture import Model, block
from eesd.common.errors import EESDError
from eesd.common.shapes import NO_HEAD
from eesd.distill import run as distill_run
from eesd.distill import teacher
from eesd.distill import teacher as teacher_module
from eesd.distill.acceptance import ValidationSet, replay_acceptance
from eesd.distill.charts import draw_training
from eesd.distill.cli import main
from eesd.distill.continuing import TorchWriter, Writer, Writing, continue_prompts
from eesd.distill.data import (
    Rows,
    batch_indices,
    prompt_order,
    read_prompts,
    read_rows,
    split_documents,
)
from eesd.distill.generate import without_echo
from eesd.distill.metrics import MetricsLog
from eesd.distill.own_engine import EngineTeacher, EngineWriter
from eesd.distill.portions import portions
from eesd.distill.run import SLOWLY
from eesd.distill.teacher import Teacher, full_sequence_inputs, largest
from eesd.distill.trainer import LATE
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_decoder, load_exit_head, make_initial_head
from eesd.runtime.engines import operators
from eesd.runtime.llm import Speculation
from eesd.runtime.text import TextCodec

SHORT = ("--steps", 60, "--lr", 1e-2, "--batch", 16, "--save-every", 60)


@pytest.fixture(scope="session")
def trained(learner: Path, own_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head after 60 steps."""
    output = tmp_path_factory.mktemp("trained") / "head"
    distill(learner, own_rows, output, *SHORT)
    return output


def test_training_lowers_the_loss_and_raises_acceptance(trained: Path) -> None:
    steps = read_losses(trained)
    assert np.mean([steps[i] for i in range(51, 61)]) < 0.85 * steps[1]
    validations = [line for line in read_metrics(trained) if "acceptance" in line]
    assert [line["step"] for line in validations] == [0, 15, 30, 60], "64, 128 and all 256 rows"
    assert validations[-1]["tokens_per_round"] > 1.05 * validations[0]["tokens_per_round"]
    assert validations[-1]["acceptance"][0] > validations[0]["acceptance"][0] + 0.05


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([*range(30)], 30),
        ([*range(10, 30)] * 2, 40),
        ([*range(10, 30)] * 3, 20),
        ([*range(20), *[5] * 20], 21),
        ([*range(20), *[7, 8] * 9, 7], 22),
        ([*range(20), *[7, 8] * 7], 34),
        ([*[5] * 30, 6], 31),
        ([4] * 40, 1),
        ([], 0),
    ],
)
def test_an_echo_at_the_end_of_own_text_is_left_out(written: list[int], kept: int) -> None:
    """An echo repeats at least three times and has at least 16 repeated tokens. The prompt and the
    text before the echo are kept."""
    prompt = [4] * 50
    assert without_echo([*prompt, *written], 50) == [*prompt, *written[:kept]]


def test_a_run_is_drawn_from_its_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = MetricsLog(tmp_path)
    log.add({"step": 0, "acceptance": [0.2, 0.3], "tokens_per_round": 1.3})
    log.add({"step": 30, "loss": 2.5, "ce": 3.5, "kl": 0.7})
    log.add({"step": 60, "acceptance": [0.5, 0.4], "tokens_per_round": 1.7})
    chart = draw_training(tmp_path)
    drawn = chart.read_text("utf-8")
    for label in ("Loss", "Acceptance by depth", "step 0", "step 60"):
        assert f">{label}<" in drawn
    chart.write_text("mine")
    with pytest.raises(EESDError, match="did not write it"):
        draw_training(tmp_path)


@pytest.mark.parametrize(
    ("options", "deep"),
    [
        (None, (2, 3)),
        (("--deep", "none"), ()),
        (("--mlp", 0), (2, 3)),
        (("--deep", "3", "--mlp", 7, "--blocks", 2), (3,)),
    ],
    ids=["usual", "no deep layers", "no MLP", "narrow MLPs"],
)
def test_validation_counts_equal_the_runtime_statistics(
    learner: Path,
    own_rows: Path,
    trained: Path,
    tmp_path: Path,
    options: tuple[object, ...] | None,
    deep: tuple[int, ...],
) -> None:
    """Some rounds are replayed from parallel passes. At each depth, they give the same counts as
    rounds that the engines run."""
    checkpoint = Checkpoint(learner)
    if options is not None:
        trained = tmp_path / "head"
        distill(learner, own_rows, trained, *SHORT, *options)
    (stored,) = trained.glob("validation-*.safetensors")
    validation = ValidationSet.load(stored)
    lm_head = as_torch(checkpoint.lm_head())
    head = load_exit_head(checkpoint, trained)
    assert head.exit_config.deep == deep
    replayed = replay_acceptance(validation.correct_drafts(head, checkpoint.geometry, lm_head), 5)
    llm = eesd.load(
        export_engine(
            learner, tmp_path / "plans", "--exit-head", trained, "--quantize-draft", "none"
        ),
        speculation=Speculation("fixed:k=5", guard=False, drafter="exit"),
    )
    verified = np.zeros(5, int)
    accepted = np.zeros(5, int)
    rounds = 0
    for tokens, start, end in zip(
        validation.tokens, validation.starts, validation.ends, strict=True
    ):
        completion = llm.generate(
            tokens[:start].tolist(), max_new_tokens=int(end - start), ignore_eos=True
        )
        assert completion.tokens == tokens[start:end].tolist()
        rounds += completion.stats.rounds
        verified[: len(completion.stats.verified_at_depth)] += completion.stats.verified_at_depth
        accepted[: len(completion.stats.accepted_at_depth)] += completion.stats.accepted_at_depth
    assert (tuple(verified), tuple(accepted), rounds) == (
        replayed.verified,
        replayed.accepted,
        replayed.rounds,
    )
    initial_head = make_initial_head(checkpoint, head.exit_config)
    initial = replay_acceptance(
        validation.correct_drafts(initial_head, checkpoint.geometry, lm_head), 5
    )
    assert replayed.tokens_per_round > initial.tokens_per_round


def test_resume_after_a_kill_gives_the_same_losses_and_weights(
    learner: Path, own_rows: Path, tmp_path: Path
) -> None:
    """The run gets SIGKILL between two checkpoints. The resumed run is compared with an
    uninterrupted run."""
    options = ("--steps", 24, "--accumulate", 2, "--deep", "2,3")
    distill(learner, own_rows, tmp_path / "whole", *options)
    command = (
        "-m",
        "eesd.distill.cli",
        "--model",
        learner,
        "--exit-layer",
        1,
        "--data",
        own_rows,
        "-o",
        tmp_path / "killed",
        *SMALL,
        *options,
    )
    assert end_at("step     12  loss", signal.SIGKILL, command) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] != ["checkpoint-24"]
    distill(learner, own_rows, tmp_path / "killed", *options)
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "whole")
    assert list(read_losses(tmp_path / "killed")) == list(range(1, 25))
    for name in ("exit_head.safetensors", "checkpoint-24/optimizer.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def own_text(learner: Path, prompts: Path) -> tuple[object, ...]:
    """Returns the arguments of a run that trains on the model's continuations of prompts."""
    return ("--model", learner, "--exit-layer", 1, "--self-generate", prompts, *SMALL)


def test_a_run_begins_with_little_text_and_ends_cleanly_when_it_is_told_to(
    learner: Path, tmp_path: Path
) -> None:
    """The run gets SIGTERM after the first of three portions. The resumed run is compared with an
    uninterrupted run."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"t{i} t{i}"}) + "\n" for i in range(5, 60)))
    arguments = (
        *own_text(learner, prompts),
        "--own-rows",
        250,
        "--own-batch",
        4,
        "--steps",
        50,
        "--own-text",
    )
    whole = succeed(main, *arguments, tmp_path / "text", "-o", tmp_path / "whole").output
    assert whole.index("step 12 of 50: 64 of 250 rows are in use") < whole.index("step     13")
    assert [line["step"] for line in read_metrics(tmp_path / "whole") if "acceptance" in line] == [
        *(0, 12, 25, 50)
    ]
    killed = tmp_path / "killed"
    command = (*arguments, tmp_path / "more-text", "-o", killed)
    code = end_at("step     14  loss", signal.SIGTERM, ("-m", "eesd.distill.cli", *command))
    assert code == 128 + signal.SIGTERM
    texts = len([*(tmp_path / "more-text").glob("shard-*")])
    assert texts < len([*(tmp_path / "text").glob("shard-*")])
    assert not [*tmp_path.rglob(".*")], "no temporary file, directory or lock is left"
    (checkpoint,) = killed.glob("checkpoint-*")
    assert 14 <= int(checkpoint.name.removeprefix("checkpoint-")) < 25
    succeed(main, *command)
    assert read_losses(killed) == read_losses(tmp_path / "whole")
    name = "exit_head.safetensors"
    assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_first_rows_need_only_the_first_prompts_that_the_model_writes() -> None:
    order = prompt_order(40, given=6, own=3, seed=1)
    own = order >= 6
    assert order[own].tolist()[:4] == [6, 7, 8, 6] and own[:9].sum() == 3
    assert own[:3].sum() == own[3:6].sum() == 1
    assert sorted(order[:9]) == sorted(order[9:18]) == [*range(9)]
    assert order[:9].tolist() != order[9:18].tolist()
    assert prompt_order(5, given=0, own=3, seed=1).tolist() == [0, 1, 2, 0, 1]
    assert sorted(prompt_order(4, given=4, own=0, seed=1)) == [*range(4)]


def test_each_portion_has_twice_the_text_of_the_one_before() -> None:
    assert portions(500, 1000, 64) == [(64, 128), (128, 256), (256, 512), (500, 1000)]
    assert portions(500, 5, 64) == [(128, 1), (256, 2), (500, 5)]
    assert portions(40, 5, 64) == [(40, 5)]


def test_training_from_a_cache_gives_the_same_losses_without_the_teacher(
    learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--steps", 6, "--mix", own_rows)
    distill(learner, own_rows, tmp_path / "online", *options)
    distill(learner, own_rows, tmp_path / "filling", *options, "--offline", tmp_path / "cache")
    monkeypatch.setattr(
        "eesd.distill.run.load_decoder", lambda *_: pytest.fail("the teacher was loaded")
    )
    distill(learner, own_rows, tmp_path / "cached", *options, "--offline", tmp_path / "cache")
    assert (
        read_losses(tmp_path / "online")
        == read_losses(tmp_path / "filling")
        == read_losses(tmp_path / "cached")
    )


def test_a_run_at_a_constant_rate_goes_on_with_more_text(
    learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first targets and the draft vocabulary are kept. Other changed options are still
    refused."""
    monkeypatch.setattr(teacher, "SHARD_ROWS", 64)
    rows = np.load(own_rows)
    first = tmp_path / "first.npy"
    second = tmp_path / "second.npy"
    np.save(first, rows[:160])
    np.save(second, rows[160:])
    options: tuple[object, ...] = (
        "--cooldown",
        0,
        "--draft-vocab",
        40,
        "--offline",
        tmp_path / "cache",
        "--deep",
        3,
        "--validation",
        own_rows,
        "--save-every",
        10,
    )
    distill(learner, first, tmp_path / "head", *options, "--steps", 10)
    shards = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("shard-*")}
    vocabulary = load_file(tmp_path / "head/exit_head.safetensors")["draft_vocab"]
    distill(learner, first, tmp_path / "head", "--data", second, *options, "--steps", 30)
    assert sorted(read_losses(tmp_path / "head")) == [*range(1, 31)]
    assert torch.equal(
        load_file(tmp_path / "head/exit_head.safetensors")["draft_vocab"], vocabulary
    )
    kept = {
        path.name
        for path in (tmp_path / "cache").glob("shard-*")
        if shards.get(path.name) == path.stat().st_mtime_ns
    }
    # The third shard was not full.
    assert len(shards) == 3 and kept == {"shard-00000.safetensors", "shard-00001.safetensors"}
    again = (
        "--model",
        learner,
        "--exit-layer",
        1,
        "-o",
        tmp_path / "head",
        *SMALL,
        *options,
        "--steps",
        40,
    )
    assert_refused(run(main, *again, "--data", second), "cache", "other data")
    assert_refused(
        run(main, *again, "--data", first, "--data", second, "--lr", 1), "other options (lr"
    )
    assert_refused(
        run(main, *again, "--data", first, "--data", second, "--cooldown", 0.5),
        "other options (cooldown",
    )


def test_a_run_at_a_constant_rate_gives_the_mean_of_its_weights(
    learner: Path, own_rows: Path, tmp_path: Path
) -> None:
    """The mean is also right if a run continues. Later weights count more."""
    mean: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3):
        distill(
            learner, own_rows, tmp_path / "mean", "--cooldown", 0, "--steps", step, "--lr", 1e-2
        )
        checkpoint = tmp_path / "mean" / f"checkpoint-{step}"
        weights = load_file(checkpoint / "head.safetensors")
        mean = {
            name: torch.lerp(mean.get(name, value), value, (LATE + 1) / (step + LATE))
            for name, value in weights.items()
        }
        for name, value in load_file(checkpoint / "average.safetensors").items():
            torch.testing.assert_close(value, mean[name])
    head = load_exit_head(Checkpoint(learner), tmp_path / "mean").state_dict()
    for name, value in mean.items():
        # The head is stored with 16 bits.
        torch.testing.assert_close(head[name].float(), value, atol=1e-2, rtol=1e-2)
    assert any((mean[name] - value).abs().max() > 1e-3 for name, value in weights.items())
    distill(learner, own_rows, tmp_path / "cooled", "--steps", 1)
    assert not (tmp_path / "cooled/checkpoint-1/average.safetensors").exists()


def test_a_cache_with_more_layers_serves(
    learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill(
        learner,
        own_rows,
        tmp_path / "deep",
        "--steps",
        2,
        "--deep",
        "2,3",
        "--offline",
        tmp_path / "cache",
    )
    distill(learner, own_rows, tmp_path / "online", "--steps", 4, "--deep", 3)
    monkeypatch.setattr(
        "eesd.distill.run.Run._teacher", lambda *_: pytest.fail("targets were computed")
    )
    distill(
        learner,
        own_rows,
        tmp_path / "cached",
        "--steps",
        4,
        "--deep",
        3,
        "--offline",
        tmp_path / "cache",
    )
    assert read_losses(tmp_path / "online") == read_losses(tmp_path / "cached")


def test_self_generation_writes_only_missing_shards(learner: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "abc def"},
        {"text": "x = 1"},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = (
        *own_text(learner, prompts),
        "-o",
        tmp_path / "out",
        "--own-rows",
        40,
        "--own-batch",
        4,
        "--steps",
        2,
    )
    succeed(main, *arguments)
    shards = sorted((tmp_path / "out" / "own-text").glob("shard-*"))
    assert len(shards) == 5
    before = [shard.read_bytes() for shard in shards]
    kept = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    succeed(main, *arguments)
    assert [shard.read_bytes() for shard in shards] == before
    assert shards[0].stat().st_mtime_ns == kept


@pytest.mark.parametrize("batch", [4, 40])
def test_the_rows_of_a_seed_do_not_depend_on_how_many_are_written_together(
    learner: Path, tmp_path: Path, batch: int
) -> None:
    """Sampled rows do not depend on this number either. The engine that wrote and read the rows is
    deleted at the end."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc def"}\n{"text": "x = 1"}\n')
    arguments = (
        *own_text(learner, prompts),
        "--own-rows",
        40,
        "--steps",
        1,
    )
    found = []
    for size in (1, batch):
        output = tmp_path / str(size)
        succeed(main, *arguments, "--own-batch", size, "-o", output)
        shards = [load_file(path) for path in sorted((output / "own-text").glob("shard-*"))]
        found.append(torch.cat([shard["tokens"] for shard in shards]))
        assert not list(output.rglob("engine-*"))
    assert torch.equal(*found)


def test_without_operators_torch_writes_and_says_so(
    learner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc def"}\n')
    monkeypatch.setattr(operators, "missing", lambda: "They are not there.")
    monkeypatch.setattr(EngineWriter, "texts", lambda *_: pytest.fail("the operators were used"))
    arguments = own_text(learner, tmp_path / "prompts.jsonl")
    result = succeed(main, *arguments, "--own-rows", 20, "--steps", 1, "-o", tmp_path / "out")
    assert (
        SLOWLY in result.stderr and len(list((tmp_path / "out" / "own-text").glob("shard-*"))) == 1
    )


def test_the_model_writes_its_own_prompts(learner: Path, tmp_path: Path) -> None:
    """The turns begin with the given words, are complete, and are answered. Existing files are
    kept."""
    arguments = (
        "--model",
        learner,
        "--exit-layer",
        1,
        "--self-prompt",
        8,
        "-o",
        tmp_path / "out",
        *SMALL,
        "--self-prompt-start",
        "ab",
        "--self-prompt-start",
        "",
        "--own-rows",
        20,
        "--steps",
        1,
    )
    succeed(main, *arguments)
    files = sorted((tmp_path / "out" / "own-text").glob("self-prompts-*.jsonl"))
    turns = [
        json.loads(line)["messages"][0] for file in files for line in file.read_text().splitlines()
    ]
    assert len(turns) >= 8 and all(
        turn["role"] == "user" and turn["content"].strip() for turn in turns
    )
    assert len({turn["content"] for turn in turns}) > 4
    assert 0.3 < sum(turn["content"].startswith("ab") for turn in turns) / len(turns) < 0.7
    before = [file.stat().st_mtime_ns for file in files]
    assert list((tmp_path / "out" / "own-text").glob("shard-*"))
    succeed(main, *arguments)
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.fixture(params=["torch", "operators"])
def writer(request: pytest.FixtureRequest, learner: Path, tmp_path: Path) -> Writer:
    """A writer of each kind, one after the other."""
    checkpoint = Checkpoint(learner)
    if request.param == "torch":
        return TorchWriter(load_decoder(checkpoint))
    needs_operators()
    return EngineWriter(checkpoint, tmp_path / "engine", 2)


def needs_operators() -> None:
    if operators.missing():
        pytest.skip(operators.missing())


def test_continuations_in_a_batch_equal_those_of_single_prompts(writer: Writer) -> None:
    """Continuations are equal even if they are sampled, if a row takes another prompt after its
    text has ended, and at the end, when rows are dropped."""
    prompts = [[5, 6, 7], [10] * 70, [40, 41], [9], [50, 51, 52], [8, 9], [3] * 12, [7, 4]]
    limits = [23, 90, 7, 21, 30, 40, 12, 64]
    temperatures = [0, 0.7, 1, 0, 1, 0.7, 1, 0.7]
    alone = [
        continue_prompts(
            writer, Writing([prompt], [limit], [temperature], partial(numbers, number), (2,))
        )[0]
        for number, (prompt, limit, temperature) in enumerate(
            zip(prompts, limits, temperatures, strict=True)
        )
    ]
    assert all(
        len(text) == limit or text[-1] == 2 for text, limit in zip(alone, limits, strict=True)
    )
    for rows in (None, 1, 3, 5):
        assert (
            continue_prompts(
                writer, Writing(prompts, limits, temperatures, partial(numbers, 0), (2,), rows)
            )
            == alone
        )


def numbers(first: int, text: int) -> np.random.Generator:
    return np.random.default_rng([7, first + text])


def test_sampled_continuations_follow_the_model_distribution(learner: Path, writer: Writer) -> None:
    """At temperature 1, the first tokens of 2000 texts are compared with the model's
    distribution."""
    count = 2000
    texts = continue_prompts(
        writer,
        Writing([[5, 6, 7]] * count, [4] * count, [1] * count, partial(numbers, 0), (2,), 64),
    )
    _, targets = Teacher(load_decoder(Checkpoint(learner)), [1], 97, "float32")(
        torch.tensor([[5, 6, 7]])
    )
    expected = torch.zeros(97).index_add(
        0, targets.top_ids[0, -1].long(), targets.top_logprobs[0, -1].float().exp()
    )
    frequencies = torch.bincount(torch.tensor(texts)[:, 3], minlength=97) / count
    assert (frequencies - expected).abs().max() < 5 * (0.25 / count) ** 0.5


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_1", "Q8_0"])
def test_operators_write_what_an_engine_directory_generates(
    kind: str, learner: Path, tmp_path: Path
) -> None:
    """Greedy texts equal the texts of ``eesd.load``, and the quantized levels of a file are kept.
    Sampled texts do not depend on the numbers of rows and threads."""
    needs_operators()
    model = (
        gguf_files.write(tmp_path / "model.gguf", Spec("llama", matrices=kind))
        if kind.startswith("Q")
        else learner
    )
    if kind == "bfloat16":
        model = shutil.copytree(learner, tmp_path / "model")
        weights = {
            name: tensor.bfloat16()
            for name, tensor in load_file(model / "model.safetensors").items()
        }
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"dtype": kind}))
    checkpoint = Checkpoint(model)
    prompts = [[5, 6, 7], [10] * 30, [40], *([number] * 9 for number in range(50, 58))]
    limits = [40] * len(prompts)
    texts = []
    for threads, rows in ((1, 1), (2, 8)):
        writer = EngineWriter(checkpoint, tmp_path / f"engine-{threads}", threads)
        texts += [
            continue_prompts(
                writer, Writing(prompts, limits, temperatures, partial(numbers, 0), (), rows)
            )
            for temperatures in ([0] * 11, [0, 0.7, 1, 0.7, 1, 0.7, 1, 0.7, 1, 0.7, 1])
        ]
    assert texts[:2] == texts[2:]
    llm = eesd.load(export_engine(model, tmp_path / "plans", "--exit-layer", 1), speculation=None)
    assert llm.manifest.dtype == ("bfloat16" if kind == "bfloat16" else "float32")
    assert bool(llm.manifest.quantization.tensors) == kind.startswith("Q")
    for prompt, text in zip(prompts, texts[0], strict=True):
        assert (
            llm.generate(prompt, max_new_tokens=40 - len(prompt), ignore_eos=True).tokens
            == text[len(prompt) :]
        )


def test_operators_read_what_they_wrote(tmp_path: Path) -> None:
    """After each token of a greedy text, the best token of the targets is the next token."""
    needs_operators()
    checkpoint = Checkpoint(
        gguf_files.write(tmp_path / "model.gguf", Spec("llama", matrices="Q4_1"))
    )
    length = EngineTeacher.CHUNK + 9
    writer = EngineWriter(checkpoint, tmp_path / "engine", 1)
    texts = continue_prompts(
        writer, Writing([[5, 6, 7], [40]], [length] * 2, [0, 0], partial(numbers, 0), ())
    )
    teacher = EngineTeacher(checkpoint, tmp_path / "engine", [1, 2], 3, "bf16", length, 2)
    _, targets = teacher(torch.tensor(texts))
    assert [ids[2:-1, 0].tolist() for ids in targets.top_ids] == [text[3:] for text in texts]


def test_operators_read_what_torch_reads(learner: Path, tmp_path: Path) -> None:
    needs_operators()
    checkpoint = Checkpoint(learner)
    ids = torch.randint(3, 97, (2, EngineTeacher.CHUNK + 5))
    expected, wanted = Teacher(load_decoder(checkpoint), [1, 3], 5, "float32")(ids)
    hidden, targets = EngineTeacher(
        checkpoint, tmp_path / "engine", [1, 3], 5, "float32", ids.shape[1], 1
    )(ids)
    assert hidden.keys() == expected.keys()
    for layer, states in hidden.items():
        torch.testing.assert_close(states, expected[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(targets.top_logprobs, wanted.top_logprobs, atol=2e-3, rtol=1e-3)
    assert (targets.top_ids == wanted.top_ids).float().mean() > 0.99


def test_an_engine_is_made_once_and_again_if_it_is_damaged_small_or_of_another_model(
    learner: Path, tmp_path: Path
) -> None:
    needs_operators()
    directory = tmp_path / "engine"

    def write(limit: int = 9) -> list[list[int]]:
        writer = EngineWriter(Checkpoint(learner), directory, 1)
        return continue_prompts(writer, Writing([[5, 6, 7]], [limit], [0], partial(numbers, 0), ()))

    first = write()
    made = (directory / "manifest.json").stat().st_mtime_ns
    assert write() == first and (directory / "manifest.json").stat().st_mtime_ns == made
    [weights] = directory.glob("cpu-*/weights.bin")
    os.truncate(weights, 100)
    assert write() == first
    edit_manifest(directory, "exit_head/base", "0" * 64)
    assert write() == first
    edit_manifest(directory, "max_seq_len", 8)
    assert write() == first


def test_short_documents_share_a_row() -> None:
    lengths = (12, 8, 30, 3, 45, 20, 1)
    documents = [np.full(length, index + 1) for index, length in enumerate(lengths)]
    rows = split_documents(documents, 39)
    assert [
        sorted(set(row[:n].tolist())) for row, n in zip(rows.tokens, rows.lengths, strict=True)
    ] == [
        [1, 2],
        [3, 4],
        [5],
        [6, 7],
    ]
    assert rows.lengths.tolist() == [20, 33, 40, 21], (
        "the rest of the document of 45 tokens is too short for a row"
    )


def test_chats_are_read_to_their_answers_and_asked_for_new_ones(
    learner: Path, tmp_path: Path
) -> None:
    """In rows, nothing follows the last answer. In prompts, the model's own answer follows."""
    codec = TextCodec(learner)
    path = tmp_path / "chats.jsonl"
    messages = [
        {"role": "user", "content": "abc def ghi"},
        {"role": "assistant", "content": "an answer"},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (row,) = read_rows([path], codec, 256, 127).tokens
    (prompt,) = read_prompts([path], codec, 256, 1, 32, 128, 0)
    assert codec.render(messages) == codec.render(messages, answer=False) + "<assistant>"
    assert row[row > 0].tolist() == codec.ids(codec.render(messages, answer=False), special=False)
    assert prompt.tokens == codec.encode(messages)


def test_each_epoch_uses_every_row_once_and_mixes_in_a_fixed_share() -> None:
    windows = split_documents([np.arange(20)] * 30, 19)
    rows = Rows(windows.tokens, windows.lengths, num_primary=24)
    indices = np.concatenate([batch_indices(rows, 4, 0.25, number, 7) for number in range(16)])
    primary = indices[indices < 24]
    mixed = indices[indices >= 24]
    assert len(mixed) == 16 and sorted(primary[:24]) == list(range(24)) == sorted(primary[24:48])
    assert sorted(mixed[:6]) == list(range(24, 30))


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_process(
    learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with batches of two rows are stopped and resumed. They are compared with a
    single process that trains on the same rows. In both cases the rows are one portion."""
    arguments = [
        "--model",
        learner,
        "--exit-layer",
        1,
        "--data",
        own_rows,
        *SMALL,
        "--batch",
        2,
        "--accumulate",
        2,
        "--steps",
        8,
    ]
    command = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "eesd.distill.cli",
        *arguments,
        "-o",
        tmp_path / "two",
        "--offline",
        tmp_path / "cache",
    )
    end_at("step      6  loss", signal.SIGTERM, command)
    assert not (tmp_path / "two" / "checkpoint-8").exists()
    line = [sys.executable, *map(str, command)]
    resumed = subprocess.run(line, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr[-6000:]
    assert (
        resumed.stdout.count("step      8  loss") == 1 and "step      5  loss" not in resumed.stdout
    )
    monkeypatch.setattr(distill_run, "FIRST", 1000)
    distill(learner, own_rows, tmp_path / "one", "--batch", 2, "--accumulate", 4, "--steps", 8)
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen3-bias"])
def test_whole_passes_have_the_states_of_masked_ones(
    family: str, family_dir: Callable[[str], Path], monkeypatch: Any
) -> None:
    checkpoint = Checkpoint(family_dir(family))
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    teacher = Teacher(load_decoder(checkpoint), [1, 3], 5, "float32")
    expected, wanted = teacher(ids)
    monkeypatch.setattr(
        teacher_module, "full_sequence_inputs", partial(full_sequence_inputs, whole=True)
    )
    hidden, targets = teacher(ids)
    for layer, states in hidden.items():
        torch.testing.assert_close(states, expected[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(targets.top_logprobs, wanted.top_logprobs, atol=1e-3, rtol=1e-3)


def test_a_whole_pass_has_the_gradients_of_a_masked_one(family_dir: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(family_dir("llama-linear"))
    decoder: Any = load_decoder(checkpoint)
    described = Model(checkpoint.geometry, NO_HEAD).layer(0)
    layer = decoder.model.layers[0].requires_grad_()
    x = torch.randn(2, 30, checkpoint.geometry.hidden_size)
    gradients = []
    for whole in (False, True):
        inputs, [cache] = full_sequence_inputs(
            checkpoint.geometry, 2, 30, 1, torch.float32, x.device, whole
        )
        assert cache[0].numel() == (0 if whole else x.shape[0] * 30 * 2 * 16)
        layer.zero_grad()
        block(decoder.operations(inputs, [cache]), described, x).square().mean().backward()
        gradients.append(
            [value.grad.clone() for value in layer.parameters() if value.grad is not None]
        )
    assert len(gradients[0]) == len(list(layer.parameters()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [64 * 40, 64 * 40 + 1, 64 * 8])
def test_the_largest_logits_are_those_of_topk(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, :64] += 20  # all are in one block
    for found, expected in zip(largest(logits, 8), logits.topk(8), strict=True):
        assert torch.equal(found, expected)
