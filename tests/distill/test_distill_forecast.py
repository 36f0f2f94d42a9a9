"""What ``eesd-distill`` says before it begins: tokens, time, and what a head will know."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.command import assert_refused, run, succeed
from support.distilling import LENGTH, SMALL, distill
from support.rehearsal import SHAPES

from eesd.common.geometry import ExitConfig
from eesd.distill import forecast as forecast_module
from eesd.distill.cli import main
from eesd.distill.forecast import HEADS, READING, TRAINING, WRITING, Forecast, Known, Machine, Work, forecast
from eesd.distill.options import TrainingOptions
from eesd.export.predict import GPUS
from eesd.model.checkpoint import Checkpoint
from eesd.model.exit_head import ExitHead


@pytest.mark.parametrize("options", [TrainingOptions(1), TrainingOptions(1, deep=(2, 3), draft_vocab=40, own_lm_head=True)])
def test_work_is_that_of_the_weights(learner: Path, options: TrainingOptions) -> None:
    """Counted from the modules themselves: all matrices of the model but its embeddings, and of the head with its LM head."""
    checkpoint = Checkpoint(learner)
    geometry = checkpoint.geometry
    training = replace(options, steps=10, batch=4, accumulate=2, length=32)
    work, machine = Work(geometry, training, 1000, 5000, 8, True, 1, 4), Machine(1e9)
    found = forecast(work, machine)
    model = sum(value.numel() for value in checkpoint.decoder().state_dict().values() if value.ndim == 2)
    config = ExitConfig(1, own_lm_head=True, draft_vocab=training.draft_vocab, deep=training.deep)
    head = sum(value.numel() for value in ExitHead(geometry, config).parameters() if value.ndim == 2)
    model -= 0 if geometry.tied_embeddings else geometry.vocab_size * geometry.hidden_size
    assert (found.written, found.read, found.trained) == (1000, 5000, 10 * 4 * 2 * 32)
    expected = (2 * model * 1000 / WRITING, 2 * model * 5000 / READING, 6 * head * found.trained / TRAINING)
    assert found.seconds == pytest.approx([one / 1e9 for one in expected])
    again = forecast(replace(work, written=0, offline=False), machine)
    assert again.read == again.trained == found.trained and again.seconds[0] == 0, "the teacher runs on every batch"
    shared = forecast(replace(work, processes=4), machine)
    assert shared.trained == 4 * found.trained, "each process has batches of its own"
    assert shared.seconds == pytest.approx([found.seconds[0] / 4, found.seconds[1] / 4, found.seconds[2]])


def test_a_gpu_waits_for_memory_and_for_its_host() -> None:
    """The two runs of an H200 that the constants are fitted to: SmolLM2-135M, rows of 768 tokens."""
    training = TrainingOptions(2, own_lm_head=True, draft_vocab=8192, deep=(10, 20, 30), steps=1000, batch=16, length=768)
    work = Work(SHAPES["135M"], training, 10**8, 10**8, 2048, False, 1, 2)
    found = forecast(work, Machine.of(GPUS["h200"]))
    assert 10**8 / found.seconds[0] == pytest.approx(211_000, rel=0.1)
    wide = forecast(replace(work, own_batch=4096), Machine.of(GPUS["h200"]))
    assert 10**8 / wide.seconds[0] == pytest.approx(197_000, rel=0.1)
    assert 0.041 < sum(found.seconds[1:]) / training.steps < 0.074
    slow = forecast(replace(work, own_batch=16), Machine.of(GPUS["h200"]))
    assert slow.seconds[0] > 10 * wide.seconds[0], "few rows read all weights for few tokens"


def test_a_head_is_forecast_from_one_that_saw_as_much_and_as_different_text() -> None:
    def nearest(trained: float, text: float) -> Known:
        return Forecast(0, 0, int(trained), int(text), (0, 0, 0)).nearest()

    shipped = nearest(160e6, 70e6)
    assert (shipped.first, shipped.tokens) == (0.581, 2.45) and shipped is HEADS[-1]
    again_and_again = nearest(48e6, 1e6)
    assert again_and_again.text < 4e6 and again_and_again.first < shipped.first, "the same text again teaches less"
    assert nearest(1, 1) is HEADS[0] and nearest(0, 0) is HEADS[0]
    assert all(before.first < after.first and before.tokens < after.tokens for before, after in pairwise(HEADS))


def test_it_is_said_before_the_work(learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of this run, and what the nearest known head knew."""
    monkeypatch.setattr(forecast_module, "HEADS", (Known(100, 100, 0.1, 1.1), Known(10**9, 10**9, 0.9, 3.0)))
    said = distill(learner, own_rows, tmp_path / "head", "--steps", 5).stdout
    assert f"1 min to train on {5 * 4 * LENGTH} tokens" in said and "right in 0.1, and 1.1 tokens a round" in said
    assert "to write" not in said and said.startswith("About ")
    assert not distill(learner, own_rows, tmp_path / "head", "--steps", 5).stdout.startswith("About "), "it is done already"
    arguments = ("--model", learner, "--exit-layer", 1, "--self-prompt", 4, "-o", tmp_path / "own", *SMALL)
    said = succeed(main, *arguments, "--own-rows", 20, "--steps", 1).stdout
    assert f"to write {10 * LENGTH} tokens" in said


def test_the_rate_is_that_of_this_machine() -> None:
    assert Machine.measured(torch.device("cpu"), "float32").rate > 1e8
    assert forecast_module._copy_rate(torch.device("cpu")) > 1e8


PAGE = Path(__file__).parent.parent.parent / "docs/distill.md"
CONFIGS = {
    "Llama-3.2-1B": "1B",
    "Llama-3.2-3B": "3B",
    "Llama-3.1-8B": "8B",
    "Qwen3-8B": "Qwen3-8B",
}
"""Models of the page, and the shapes of the tests."""
RECIPE = ("--own-rows", 65536, "--length", 512, "--batch", 16, "--steps", 8000)


def asked(directory: Path, where: str, *options: object) -> str:
    return succeed(main, "--model", directory, "--predict", where, *options).stdout


def config_of(directory: Path, shape: str) -> Path:
    """A directory with nothing but ``config.json``."""
    one, kind = SHAPES[shape], "qwen3" if shape.startswith("Qwen3") else "llama"
    sizes = {"vocab_size": one.vocab_size, "hidden_size": one.hidden_size, "intermediate_size": one.intermediate_size}
    sizes |= {"num_hidden_layers": one.num_layers, "num_attention_heads": one.num_heads, "head_dim": one.head_dim}
    fields = {
        "model_type": kind,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": one.num_kv_heads,
        "max_position_embeddings": 32768,
    }
    (directory / "config.json").write_text(json.dumps(sizes | fields | {"tie_word_embeddings": one.tied_embeddings}))
    return directory


@pytest.fixture
def only_config(tmp_path: Path) -> Path:
    return config_of(tmp_path, "8B")


def test_a_gpu_is_predicted_without_weights(only_config: Path, own_rows: Path) -> None:
    said = asked(only_config, "h100")
    assert "8,030 M weights" in said and "383.0 M weights" in said and "computed, not measured, for H100 SXM, 80 GB" in said
    assert "| it computes targets | 8.2 M tokens |" in said and "with the training" in said
    assert "a head of SmolLM2-135M had" in said
    most = int(said.partition("--own-batch 64 fits; so does up to ")[2].partition(".")[0])
    assert f"--own-batch {most} fits" in asked(only_config, "h100", "--own-batch", most)
    assert f"--own-batch {2 * most} does not fit; {most} does." in asked(only_config, "h100", "--own-batch", 2 * most)
    small = asked(only_config, "l4", "--batch", 32)
    assert "--batch 32 does not fit; nor does 1." in small and "With --offline DIR" in small
    assert "--batch 128 does not fit; --batch 32 --accumulate 4 does." in asked(only_config, "rtx5090", "--batch", 128)
    assert "--batch 32 fits" in asked(only_config, "rtx5090", "--batch", 32, "--accumulate", 4)
    offline = asked(only_config, "l4", "--batch", 32, "--offline", only_config / "cache")
    assert "--batch 32 fits" in offline and "GB of targets" in offline and not (only_config / "cache").exists()
    assert "nor does 1" in asked(only_config, "l4", "--dtype", "float32")
    several = asked(only_config, "4xh100", "--data", own_rows)
    assert "for 4 x H100 SXM" in several and "the model writes" not in several and "of own text" not in several
    assert sorted(path.name for path in only_config.iterdir()) == ["config.json"], "nothing is written"


def test_this_cpu_is_predicted_as_a_run_is(learner: Path, own_rows: Path) -> None:
    said = asked(learner, "cpu", "--data", own_rows, "--steps", 5, *SMALL)
    assert f"1 min to train on {5 * 4 * LENGTH} tokens" in said and "memory of a GPU" not in said


def test_predictions_are_refused_by_name(learner: Path, own_rows: Path) -> None:
    for where in ("a100", "0xh100", "2xcpu", "h100x2"):
        assert_refused(run(main, "--model", learner, "--predict", where), "h200, b200, rtx5090, l4", "4xh100")
    float32 = ("--predict", "l4", "--precision", "float32")
    assert_refused(run(main, "--model", learner, *float32), "16 bits")
    assert_refused(run(main, "--model", learner, "--data", own_rows), "-o DIR")


def test_the_page_shows_what_is_predicted(tmp_path: Path) -> None:
    """Each recipe's time and memory; each fits."""
    _, _, after = PAGE.read_text("utf-8").partition("| model | `--predict` | and | together | memory, GB |\n")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in after.split("\n\n")[0].splitlines()[1:]]
    assert {row[0] for row in rows} == set(CONFIGS) and len(rows) == 10
    for model, where, options, time, size in rows:
        said = asked(config_of(tmp_path, CONFIGS[model]), where, *RECIPE, *options.split())
        cells = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if line.startswith("| ")]
        most = max(float(row[4].split()[0]) for row in cells if row[4].endswith(" GB"))
        assert (next(row[3] for row in cells if row[1] == "together"), f"{most:.1f}") == (time, size), (model, where)
        assert "does not fit" not in said
    shown = asked(config_of(tmp_path, "8B"), "h100", *RECIPE)
    example = [line[4:] for line in PAGE.read_text("utf-8").splitlines() if line.startswith(("    | ", "    --"))]
    assert len(example) == 6 and all(line in shown for line in example)
