"""The memory that ``eesd-distill --predict`` computes, against the code that runs, with all its tensors counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.rehearsal import (
    SHAPES,
    as_on_a_gpu,
    decoder_of,
    reading_bytes,
    some_rows,
    trainers_bytes,
    training_bytes,
    without_content,
    writing_bytes,
)

from eesd.common.geometry import Geometry
from eesd.distill.acceptance import ValidationSet
from eesd.distill.forecast import Work
from eesd.distill.memory import memory
from eesd.distill.options import TrainingOptions
from eesd.distill.structure import NAMES, head_config, structure
from eesd.distill.teacher import OnlineTargets, Teacher
from eesd.distill.trainer import Trainer
from eesd.model.exit_head import ExitHead


def training_of(geometry: Geometry, **options: Any) -> TrainingOptions:
    usual = structure(dict.fromkeys(NAMES) | {name: value for name, value in options.items() if name in NAMES}, geometry, None)
    return TrainingOptions(**usual, **{name: value for name, value in options.items() if name not in NAMES})


def work_of(geometry: Geometry, training: TrainingOptions, rows: int = 64, offline: bool = False) -> Work:
    return Work(geometry, training, 10**6, 10**6, rows, offline, 1, 2)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("135M", {"batch": 16, "length": 768, "cooldown": 0.0, "top_k": 32}),
    ("1B", {}),
    ("1B", {"draft_vocab": 0, "own_lm_head": False, "deep": (), "optimizer": "adamw"}),
    ("3B", {"batch": 16, "length": 512, "accumulate": 2}),
    ("8B", {"cooldown": 0.0}),
    ("Qwen3-8B", {"batch": 32, "length": 512}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_memory_of_large_models(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without content, within 2 %."""
    as_on_a_gpu(monkeypatch)
    geometry = SHAPES[name]
    training = training_of(geometry, **options)
    with without_content():
        decoder = decoder_of(geometry)
        weights = sum(value.numel() for value in decoder.parameters()) * 2
        found = [
            weights + writing_bytes(decoder, 64, training.length),
            weights + reading_bytes(decoder, training),
            weights + training_bytes(decoder, training),
        ]
    online, offline = memory(work_of(geometry, training)), memory(work_of(geometry, training, offline=True))
    assert [online.writing, offline.reading, online.training] == pytest.approx(found, rel=0.02)
    assert offline.training < online.training - weights / 2 and offline.writing == online.writing and not online.reading


def test_what_is_counted_is_what_the_trainer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer itself, with real tensors of a small model, against the count of its steps and the formula."""
    as_on_a_gpu(monkeypatch)
    geometry = SHAPES["small"]
    training = training_of(geometry, batch=8, length=128, cooldown=0.0, steps=2, draft_vocab=1024, own_lm_head=True)
    decoder = decoder_of(geometry)
    teacher = Teacher(decoder, training.layers, training.top_k, training.precision)
    rows, validation = some_rows(training), ValidationSet(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([1]), {})

    def trained() -> Sequence[Any]:
        head = ExitHead(geometry, head_config(training))
        lm_head = torch.zeros(0, geometry.hidden_size)
        targets = OnlineTargets(rows, teacher, torch.device("cpu"))
        trainer = Trainer(Accelerator(cpu=True), head, geometry, lm_head, training, rows, targets, validation, tmp_path, {})
        trainer._lm_head_rows = lm_head
        for _ in range(2):
            trainer._train_step()
            trainer.step += 1
            trainer._average()
        return trainer, head

    found = trainers_bytes(trained)
    with without_content():
        counted = training_bytes(decoder_of(geometry), training)
    assert counted == pytest.approx(found, rel=0.02)
    weights = sum(value.numel() for value in decoder.parameters()) * 2
    assert memory(work_of(geometry, training)).training - weights == pytest.approx(found, rel=0.08)
