"""A run of ``eesd-distill``: its options checked, its parts put together."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.geometry import ExitConfig
from eesd.distill.acceptance import DEPTHS, Acceptance, Validation, replay
from eesd.distill.calibrate import Calibration, calibrate
from eesd.distill.data import Rows, cut
from eesd.distill.options import Every, Losses, Training
from eesd.distill.prepare import Bar, Data, Preparation
from eesd.distill.trainer import Trainer
from eesd.model.checkpoint import Checkpoint
from eesd.model.exit_head import CONFIG, WEIGHTS, ExitHead, check_exit, save_config
from eesd.model.hub import find_model

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """Everything of one command."""

    checkpoint: Checkpoint
    accelerator: Accelerator
    training: Training
    data: Data
    output: Path
    offline: Path | None
    init_head: Path | None
    every: Every
    compiled: bool
    bar: Bar
    dtype: torch.dtype

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @cached_property
    def preparation(self) -> Preparation:
        return Preparation(self.checkpoint, self.accelerator, self.training, self.dtype, self.compiled, self.bar)

    @cached_property
    def all_rows(self) -> Rows:
        """To train on; none where nothing is trained and validation has prompts of its own."""
        if not self.training.steps and self.data.validation:
            return cut((), self.training.length)
        return self.preparation.rows(self.data)

    def validation_and_rows(self, layers: Sequence[int]) -> tuple[Validation, Rows]:
        """What to validate on, and the rows that are left to train on."""
        return self.preparation.validation(self.data, self.all_rows, layers, self.offline or self.output)

    def first_head(self, training: Training) -> ExitHead:
        """The head before training: a stored one, or made from the model's last layers."""
        wanted = ExitConfig(training.exit_layer, training.blocks, training.own_lm_head, self.preparation.base, trained=True)
        if self.init_head is None:
            return self.checkpoint.initial_head(wanted)
        head = self.checkpoint.exit_head(self.init_head)
        if replace(head.exit_config, trained=True, calibration=None) != wanted:
            raise EESDError(
                f"The head in {self.init_head} has exit layer {head.exit_config.layer} and {head.exit_config.blocks} blocks; "
                "give the same --exit-layer, --blocks and LM head option to start from it."
            )
        head.exit_config = wanted
        return head

    def train(self, report: Report) -> None:
        """Train one head."""
        self.output.mkdir(parents=True, exist_ok=True)
        layers = [self.training.exit_layer]
        head = self.first_head(self.training)
        validation, rows = self.validation_and_rows(layers)
        source = self.preparation.source(rows, layers, self.offline)
        trainer = Trainer(
            self.accelerator, head, self.checkpoint.geometry, self.checkpoint.lm_head().float(), self.training, rows, source,
            validation, self.output, self.identity(rows), self.compiled,
        )  # fmt: skip
        with self.bar("training", self.training.steps) as advance:
            trainer.run(self.every, report, advance)

    def adopt(self) -> None:
        """Put the head that was given into the output directory, as it is."""
        assert self.init_head is not None
        head = self.first_head(self.training)  # refuses one that cannot be what the options say
        if not all(value.isfinite().all() for value in head.state_dict().values()):
            raise EESDError(f"The head in {self.init_head} has weights that are no numbers; train it again.")
        self.output.mkdir(parents=True, exist_ok=True)
        if self.is_main and not self.output.samefile(self.init_head):
            for name in (WEIGHTS, CONFIG):
                with written_whole(self.output / name) as temporary:
                    shutil.copyfile(self.init_head / name, temporary)
        self.accelerator.wait_for_everyone()

    def evaluate(self) -> tuple[Acceptance, Calibration]:
        """What the head in the output directory accepts, and its calibration, which is written there."""
        validation, _ = self.validation_and_rows([self.training.exit_layer])
        device = self.accelerator.device
        head, lm_head = self.checkpoint.exit_head(self.output).to(device), self.checkpoint.lm_head().float().to(device)
        drafts = validation.drafts(head, self.checkpoint.geometry, lm_head)
        if not all(np.isfinite(text.margin).all() for text in drafts):
            raise EESDError(f"The head in {self.output} computes what is no number; its weights are damaged, train it again.")
        found = calibrate(drafts)
        if self.is_main:
            save_config(replace(head.exit_config, calibration=found.prior), self.output)
        return replay([text.right for text in drafts], DEPTHS), found

    def identity(self, rows: Rows) -> dict[str, Any]:
        """What must be the same for a run to go on, beside its training options."""
        first = str(self.init_head.resolve()) if self.init_head else ""
        processes = self.accelerator.num_processes
        return {"base": self.preparation.base, "data": rows.digest(), "init_head": first, "processes": processes}


def make_accelerator() -> Accelerator:
    """For this process, among those that torchrun or ``accelerate launch`` started."""
    no_device = not torch.accelerator.is_available()  # told so, accelerate lets processes share the work on CPUs, too
    accelerator = Accelerator(cpu=no_device)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not accelerator.is_fsdp2:
        raise EESDError(
            "FSDP was asked for, and accelerate would not use it or use its first version: give it several processes, "
            "GPUs and FSDP_VERSION=2, or unset ACCELERATE_USE_FSDP."
        )
    return accelerator


def make_run(options: dict[str, Any], bar: Bar) -> Run:
    """Check the command's options; nothing is loaded but the checkpoint's headers."""
    losses = Losses(
        options["ce"], options["kl"], options["text_ce"], options["hidden"], options["kl_temperature"],
        options["unroll"], options["unroll_decay"],
    )  # fmt: skip
    named = {field.name for field in fields(Training)}
    training = Training(**{name: value for name, value in options.items() if name in named}, losses=losses)
    output: Path = options["output"]
    shared = {field.name for field in fields(Data)}
    data = Data(
        files=options["data"],
        prompts=options["self_generate"],
        mixed=options["mix"],
        own_text=options["own_text"] or output / "own-text",
        **{name: options[name] for name in shared - {"files", "prompts", "mixed", "own_text"}},
    )
    if not training.steps and options["init_head"] is None:
        raise EESDError("--steps 0 trains nothing; give the head to calibrate with --init-head DIR.")
    given = bool(data.files) + bool(data.prompts)
    if given > 1 or (not given and (training.steps or not data.validation)):
        raise EESDError("Give either --data FILE (rows to train on) or --self-generate FILE (prompts for the model).")
    for path in (*data.files, *data.prompts, *data.mixed, *data.validation):
        if not path.is_file():
            raise EESDError(f"{path} is no file; give files of text, JSON lines or token arrays.")
    checkpoint = Checkpoint(find_model(options["model"]))
    check_exit(checkpoint.geometry, training.exit_layer, training.blocks)
    if training.length > checkpoint.config.max_positions:
        raise EESDError(f"--length {training.length} is more than the model's {checkpoint.config.max_positions} positions.")
    accelerator = make_accelerator()
    on_cpu = accelerator.device.type == "cpu"
    name = options["dtype"] or ("float32" if on_cpu or training.precision == "float32" else "bfloat16")
    every = Every(options["log_every"], options["eval_every"], options["save_every"])
    return Run(
        checkpoint, accelerator, training, data, output, options["offline"], options["init_head"], every,
        options["compiled"], bar, getattr(torch, name),
    )  # fmt: skip
