"""The training loop: steps, checkpoints from which a run goes on exactly, validation by acceptance."""

import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from eesd.common.errors import EESDError
from eesd.common.geometry import Geometry
from eesd.distill.acceptance import Acceptance, Validation
from eesd.distill.data import Rows, batch_rows
from eesd.distill.losses import PARTS
from eesd.distill.metrics import Metrics
from eesd.distill.optim import make_optimizers
from eesd.distill.options import Every, Training, difference, learning_rate
from eesd.distill.sources import Source
from eesd.distill.student import Student
from eesd.distill.teacher import element_type, whole_text
from eesd.model import exit_head
from eesd.model.exit_head import ExitHead

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole tensors, on the first process only."""
EVERYWHERE = StateDictOptions(full_state_dict=True)


class Trainer:
    """Trains one head. Everything it leaves lies in ``output``: the head, ``metrics.jsonl``, ``checkpoint-<step>/``."""

    def __init__(
        self,
        accelerator: Accelerator,
        head: ExitHead,
        geometry: Geometry,
        lm_head: Tensor,
        training: Training,
        rows: Rows,
        source: Source,
        validation: Validation,
        output: Path,
        identity: dict[str, Any],
        compiled: bool = False,
    ) -> None:
        """``identity`` says, beside the options, what must be the same for a run to go on (model, data, first weights)."""
        self.accelerator, self.geometry, self.training, self.rows = accelerator, geometry, training, rows
        self.source, self.validation, self.output, self.head = source, validation, output, head
        self.lm_head = lm_head.to(accelerator.device)
        self.identity = json.loads(json.dumps(training.as_json() | identity))
        student = Student(head, training.losses, training.precision)
        if compiled:
            student.compile(dynamic=False)
        optimizers = make_optimizers(head, training)
        self.student, *self.optimizers = accelerator.prepare(student, *optimizers)
        dtype = element_type(training.precision)
        self._text = whole_text(geometry, training.batch, training.length, len(head.blocks), dtype, accelerator.device)
        self.metrics = Metrics(output)
        self.step = 0

    def run(
        self,
        every: Every,
        report: Callable[[dict[str, Any]], None],
        advance: Callable[[int], None] = lambda _: None,
    ) -> Acceptance:
        """Train to the last step, from the last checkpoint if there is one; returns the final acceptance.

        Raises :class:`EESDError` when the loss is no number (the last checkpoint stays) or when the checkpoint is of a run with
        other options.
        """
        self._resume()
        advance(self.step)
        result = self._validate(report) if self.step == 0 else None
        started = time.monotonic()
        while self.step < self.training.steps:
            figures = self._train_step()
            self.step += 1
            last = self.step == self.training.steps
            if self.step % every.log == 0 or last or self.step == 1:
                seconds = time.monotonic() - started
                report(self._note({"step": self.step, **figures, "seconds": round(seconds, 2)}))
            if self.step % every.validate == 0 or last:
                result = self._validate(report)
            if self.step % every.save == 0 or last:
                self._save()
            advance(1)
        return result or self._validate(report)

    def _train_step(self) -> dict[str, float]:
        """One optimizer step over ``accumulate`` batches; its mean figures."""
        training, processes = self.training, self.accelerator.num_processes
        rate = learning_rate(training, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        total = torch.zeros(len(PARTS) + 2, device=self.accelerator.device)
        for micro in range(training.accumulate):
            number = (self.step * training.accumulate + micro) * processes + self.accelerator.process_index
            numbers = batch_rows(self.rows, training.batch, training.mix_share, number, training.seed)
            batch = self.source.batch(numbers, training.exit_layer).to(self.accelerator.device)
            targets = batch.targets
            partial = micro < training.accumulate - 1
            with self.accelerator.no_sync(self.student) if partial else nullcontext():
                loss, figures = self.student(
                    batch.hidden, targets.top_ids, targets.top_logprobs, batch.text, batch.mask, targets.final,
                    self.lm_head, *self._text,
                )  # fmt: skip
                self.accelerator.backward(loss / training.accumulate)
            total += torch.cat([loss.detach()[None], figures]) / training.accumulate
        mean = self.accelerator.reduce(total, "mean").tolist()
        if not math.isfinite(mean[0]):
            raise EESDError(
                f"The loss at step {self.step + 1} is not a number; the last checkpoint is kept in {self.output}. Lower --lr, "
                "or look for damaged rows in the data."
            )
        self.accelerator.clip_grad_norm_(self.student.parameters(), training.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return dict(zip(("loss", *PARTS, "agreement"), mean, strict=True)) | {"lr": rate}

    def _validate(self, report: Callable[[dict[str, Any]], None]) -> Acceptance:
        head = self.whole_head()
        found = self.validation.acceptance(head, self.geometry, self.lm_head)
        figures = {"acceptance": found.by_depth, "tokens_per_round": found.tokens_per_round}
        report(self._note({"step": self.step, **figures}))
        return found

    def _note(self, figures: dict[str, Any]) -> dict[str, Any]:
        if self.accelerator.is_main_process:
            self.metrics.add(figures)
        return figures

    def _head_state(self) -> dict[str, Tensor]:
        state: dict[str, Any] = dict(get_model_state_dict(self.student, options=WHOLE))
        return {name.removeprefix("head."): value for name, value in state.items()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        """What the optimizers remember, as ``<optimizer>|<parameter>|<name>``."""
        state: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self.optimizers):
            whole: Any = get_optimizer_state_dict(self.student, optimizer.optimizer, options=WHOLE)
            remembered: dict[str, dict[str, Any]] = whole.get("state", {})  # only the first process gets it
            for parameter, values in remembered.items():
                state |= {f"{number}|{parameter}|{name}": torch.as_tensor(value) for name, value in values.items()}
        return state

    def whole_head(self) -> ExitHead:
        """The head itself; a copy of it where processes hold parts of it."""
        if self.accelerator.num_processes == 1:
            return self.head
        state = self._head_state()
        head = ExitHead(self.geometry, self.head.exit_config).requires_grad_(False)
        if state:
            head.load_state_dict(state)
        return head.to(self.accelerator.device)

    def _save(self) -> None:
        """Write checkpoint and head; the directory of the checkpoint gets its name when it is whole."""
        head_state = self._head_state()
        optimizer_state = self._optimizer_state()
        if self.accelerator.is_main_process:
            final = self.output / f"checkpoint-{self.step}"
            temporary = self.output / f".checkpoint-{self.step}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            save_file(head_state, temporary / "head.safetensors")
            save_file(optimizer_state, temporary / "optimizer.safetensors")
            (temporary / "run.json").write_text(json.dumps({"step": self.step, "options": self.identity}, indent=2) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self.output.glob("checkpoint-*"):
                if old != final:
                    shutil.rmtree(old)
            head = ExitHead(self.geometry, self.head.exit_config).requires_grad_(False)
            head.load_state_dict(head_state)
            exit_head.save(head, self.output)
            self.metrics.plot()
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one of this very run."""
        found = sorted(self.output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        if not found:
            self.metrics.start(-1)
            return
        run = json.loads((found[-1] / "run.json").read_text())
        changed = difference(run["options"], self.identity)
        if changed:
            raise EESDError(
                f"{self.output} holds a run with other options ({changed}); give the same options to go on with it, "
                "or another --output."
            )
        state = load_file(found[-1] / "head.safetensors")
        set_model_state_dict(self.student, {f"head.{name}": value for name, value in state.items()}, options=EVERYWHERE)
        stored = load_file(found[-1] / "optimizer.safetensors")
        for number, optimizer in enumerate(self.optimizers):
            whole: Any = get_optimizer_state_dict(self.student, optimizer.optimizer, options=EVERYWHERE)
            for key, value in stored.items():
                index, parameter, name = key.split("|")
                if int(index) == number:
                    whole["state"].setdefault(parameter, {})[name] = value
            set_optimizer_state_dict(self.student, optimizer.optimizer, whole, options=EVERYWHERE)
        self.step = run["step"]
        self.metrics.start(self.step)
