"""The training loop. It runs the steps, saves checkpoints (from which a run resumes exactly), and
validates the head by its acceptance."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole, remove_leftovers
from eesd.common.geometry import Geometry
from eesd.common.json_input import read_json_object
from eesd.common.outputs import remove_directory
from eesd.common.terminal import notice
from eesd.distill.acceptance import Acceptance, ValidationSet, acceptance_by_kind, replay_acceptance
from eesd.distill.ages import random_roots
from eesd.distill.data import Rows, batch_indices
from eesd.distill.losses import LOSS_NAMES, Student
from eesd.distill.metrics import MetricsLog
from eesd.distill.options import Intervals, TrainingOptions, first_difference
from eesd.distill.portions import HeldSignals, held_signals
from eesd.distill.stored import damaged, load_tensors, saving
from eesd.distill.teacher import TargetSource, full_sequence_inputs, on_device, storage_dtype
from eesd.model import exit_head_file
from eesd.model.decoder import ExitHead
from eesd.model.loading import save_exit_head

Report = Callable[[dict[str, Any]], None]
"""Called with each line of metrics."""

LATE = 3
"""Exponent of the running mean of the head's parameters, which is used at a constant learning rate.
Step t has the weight t ** 3, so the mean lags by a fifth of the run."""
_FILES = ("head.safetensors", "average.safetensors", "optimizer.safetensors", "run.json")
"""Files of a checkpoint."""
_STATES = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""State that each optimizer keeps for a parameter."""


def _foreign(checkpoint: Path) -> str:
    """Return the reason not to replace or delete a checkpoint's directory, or "" if there is no
    reason."""
    other = (
        path.name for path in checkpoint.iterdir() if path.name not in _FILES or not path.is_file()
    )
    return next((f"it also holds {name}, which no run wrote" for name in other), "")


def _checkpoints(output: Path) -> list[Path]:
    found = (re.fullmatch(r"checkpoint-([0-9]{1,18})", path.name) for path in output.iterdir())
    return [
        output / match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))
    ]


def check_output(output: Path) -> None:
    """Raise :class:`EESDError` if training in a directory would replace checkpoints or a head that
    it did not write."""
    checkpoints = _checkpoints(output)
    for found in checkpoints:
        if found.is_symlink() or not found.is_dir() or _foreign(found):
            raise EESDError(
                f"{found} is not a checkpoint of eesd-distill; give another --output, or move "
                "it away."
            )
    if not checkpoints and not MetricsLog(output).path.exists():
        _check_head(output)


def _check_head(output: Path) -> None:
    if any(
        (output / name).exists()
        for name in (exit_head_file.WEIGHTS_FILE, exit_head_file.CONFIG_FILE)
    ):
        raise EESDError(
            f"{output} has an exit head from another source; move it away, or give "
            "another --output."
        )


def learning_rate(options: TrainingOptions, step: int) -> float:
    """Return the learning rate of step ``step`` (counted from 0). It rises linearly, stays at the
    peak, and falls linearly to 2 % of the peak."""
    warmup = (step + 1) / max(1.0, options.warmup * options.steps)
    remaining = (options.steps - step) / options.steps
    cooldown = 0.02 + 0.98 * remaining / options.cooldown if options.cooldown else 1.0
    return options.lr * min(1.0, warmup, cooldown)


def make_optimizers(head: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a head. Muon (Jordan et al. 2024) trains the matrices of the blocks,
    and AdamW trains the rest.

    Muon's updates are scaled so that both optimizers use the same learning rate.
    """
    matrices = [
        p for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")
    ]
    matrix_ids = set(map(id, matrices))
    others = [p for p in head.parameters() if id(p) not in matrix_ids]
    return [
        torch.optim.Muon(
            matrices,
            lr=options.lr,
            weight_decay=0.05,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Trainer:
    """Trains one head. The trainer writes the head, ``metrics.jsonl`` and ``checkpoint-<step>/``
    into the output directory."""

    def __init__(
        self,
        accelerator: Accelerator,
        head: ExitHead,
        geometry: Geometry,
        lm_head: Callable[[ExitHead], Tensor],
        options: TrainingOptions,
        validation: ValidationSet,
        output: Path,
        identity: dict[str, Any],
    ) -> None:
        """Prepare the head and the optimizers.

        Args:
            accelerator: Distributes the training over processes.
            head: The head to train.
            geometry: Shape of the model.
            lm_head: A function that returns the rows of the base model's LM head for a head's
                columns ([C, hidden], float32). It is not used if the head has a separate LM head.
            options: Options of the training.
            validation: The validation set.
            output: Existing output directory.
            identity: Describes the model, the data and the initial weights. A run resumes only if
                these and the options are the same.
        """
        self.accelerator = accelerator
        self.geometry = geometry
        self.options = options
        self.validation = validation
        self.output = output
        self.head = head
        self._lm_head_of = lm_head
        head = head.to(accelerator.device)
        self.identity = json.loads(json.dumps(asdict(options) | identity))
        student = Student(head, options.losses, options.precision)
        self._own_optimizers = make_optimizers(head, options)
        self.student, *self.optimizers = accelerator.prepare(student, *self._own_optimizers)
        dtype = storage_dtype(options.precision)
        self._inputs, self._caches = full_sequence_inputs(
            geometry, options.batch, options.length, len(head.blocks), dtype, accelerator.device
        )
        self.metrics = MetricsLog(output)
        self._own_head = False
        self._saved = -1
        self._seconds = 0.0
        self.step = 0
        self._means = (
            []
            if options.cooldown
            else [value.detach().clone() for value in self.student.parameters()]
        )

    def begin(self, report: Report) -> None:
        """Load the last checkpoint, or validate the head that training starts from.

        Args:
            report: Called with each line of metrics.

        Raises:
            EESDError: The checkpoint is damaged, or from a run with other options.
        """
        self._resume()
        self.lm_head = self._lm_head_of(self.head)  # a checkpoint's LM head may have other columns
        if self.step == 0:
            self._validate(report)

    def run(
        self,
        rows: Rows,
        targets: TargetSource,
        end: int,
        intervals: Intervals,
        report: Report,
        advance: Callable[[int], None],
    ) -> None:
        """Train up to a step. Then validate the head and save a checkpoint.

        SIGTERM and Ctrl-C take effect after the current step. The weights of that step are saved.

        Args:
            rows: The rows to train on.
            targets: Source of the batches of these rows.
            end: The step.
            intervals: Steps between logged metrics, validations and checkpoints.
            report: Called with each line of metrics.
            advance: Called with the number of finished steps.

        Raises:
            EESDError: The loss is not a number. The last checkpoint is kept.
        """
        alone = self.accelerator.num_processes == 1
        with held_signals() if alone else nullcontext(HeldSignals()) as held:
            while self.step < end and held.came is None:
                started = time.monotonic()
                mean = self._train_step(rows, targets)
                self.step += 1
                self._average()
                last = self.step == end
                is_logged = last or self.step == 1 or self.step % intervals.log == 0
                is_saved = last or self.step % intervals.save == 0
                is_validated = last or self.step % intervals.validate == 0
                if is_logged or is_saved or is_validated:
                    metrics = self._read(mean, self.step)
                self._seconds += time.monotonic() - started
                if is_logged:
                    report(self._log({"step": self.step, **metrics, **self._spent()}))
                if is_validated:
                    self._validate(report)
                if is_saved:
                    self._save()
                advance(1)
            if self.step > self._saved:
                self._save()

    def _spent(self) -> dict[str, float]:
        """Return the time of the steps in this process in seconds. On a GPU, also return the peak
        memory over all phases in bytes."""
        spent: dict[str, float] = {"seconds": round(self._seconds, 2)}
        if self.accelerator.device.type == "cuda":
            spent["peak_bytes"] = torch.cuda.max_memory_allocated(self.accelerator.device)
        return spent

    def _train_step(self, rows: Rows, targets: TargetSource) -> Tensor:
        """Run one optimizer step over ``accumulate`` batches. Returns the mean metrics of the step,
        which :meth:`_read` reads.

        The method reads no value from a GPU, so that the next step can be sent before this step
        ends.
        """
        options = self.options
        processes = self.accelerator.num_processes
        rate = learning_rate(options, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        total = torch.zeros(len(LOSS_NAMES) + 2, device=self.accelerator.device)
        for micro_step in range(options.accumulate):
            number = (
                self.step * options.accumulate + micro_step
            ) * processes + self.accelerator.process_index
            indices = batch_indices(rows, options.batch, options.mix_share, number, options.seed)
            batch = targets.batch(indices, options.layers).to(self.accelerator.device)
            roots = self._roots(number)
            last = micro_step == options.accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.student):
                loss, metrics = self.student(batch, roots, self.lm_head, self._inputs, self._caches)
                self.accelerator.backward(loss / options.accumulate)
            total += torch.cat([loss.detach()[None], metrics]) / options.accumulate
        mean: Tensor = self.accelerator.reduce(total, "mean")
        if mean.device.type == "cpu":
            self._read(mean, self.step + 1)
        self.accelerator.clip_grad_norm_(self.student.parameters(), options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return mean

    def _read(self, mean: Tensor, step: int) -> dict[str, float]:
        """Return the metrics of a step. After a non-finite loss, the losses of later steps are also
        non-finite. Weights that were trained with such a loss are therefore never saved, even if a
        GPU is ahead."""
        values = mean.tolist()
        if not math.isfinite(values[0]):
            raise EESDError(
                f"The loss at step {step} is not a number; the last checkpoint in "
                f"{self.output} is kept. Lower --lr, "
                "or check the data for damaged rows."
            )
        metrics: dict[str, float] = dict(
            zip(("loss", *LOSS_NAMES, "agreement"), values, strict=True)
        )
        return metrics | {"lr": learning_rate(self.options, step - 1)}

    @torch.no_grad()
    def _average(self) -> None:
        """Update the mean of the weights (Shamir and Zhang 2013). The mean has the effect of a
        cooldown, but works without a fixed end of the run."""
        share = (LATE + 1) / (self.step + LATE)
        for mean, value in zip(self._means, self.student.parameters(), strict=False):
            mean.lerp_(value, share)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """If the run averages weights, the head has the mean of its weights within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, value in zip(self._means, self.student.parameters(), strict=False):
            kept = value.clone()
            value.copy_(mean)
            mean.copy_(kept)

    def _roots(self, number: int) -> Tensor | None:
        """Return the root of each position of a batch, for a head with deep layers."""
        options = self.options
        if not options.deep:
            return None
        return on_device(
            random_roots(options.batch, options.length, options.seed, number),
            self.accelerator.device,
        )

    def _validate(self, report: Report) -> Acceptance:
        texts = self.validation.correct_drafts(self.full_head(), self.geometry, self.lm_head)
        acceptance = replay_acceptance(texts)
        kinds = acceptance_by_kind(texts, self.validation.kinds)
        metrics: dict[str, Any] = {
            "acceptance": acceptance.by_depth,
            "tokens_per_round": acceptance.tokens_per_round,
        }
        if len(kinds) > 1:
            metrics["kinds"] = {
                kind: [one.by_depth[0], one.tokens_per_round] for kind, one in kinds.items()
            }
        report(self._log({"step": self.step, **metrics}))
        return acceptance

    def _log(self, metrics: dict[str, Any]) -> dict[str, Any]:
        if self.accelerator.is_main_process:
            self.metrics.add(metrics)
        return metrics

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizers. Its names are ``<optimizer>|<parameter>|<name>``."""
        return {
            f"{number}|{parameter}|{name}": value
            for number, optimizer in enumerate(self._own_optimizers)
            for parameter, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    def full_head(self) -> ExitHead:
        """Return a copy of the head, which has the mean of the weights if the run averages
        weights."""
        head = ExitHead(self.geometry, self.head.exit_config).requires_grad_(False)
        with self._averaged():
            head.load_state_dict(self.head.state_dict())
        return head.to(self.accelerator.device)

    def _save(self) -> None:
        """Write a checkpoint and the head. The checkpoint's directory gets its name when it is
        complete."""
        if self.accelerator.is_main_process:
            averaged = self.full_head()
            final = self.output / f"checkpoint-{self.step}"
            with saving(final), directory_written_whole(final, _foreign) as temporary:
                save_file(self.head.state_dict(), temporary / "head.safetensors")
                if self._means:
                    save_file(averaged.state_dict(), temporary / "average.safetensors")
                save_file(self._optimizer_state(), temporary / "optimizer.safetensors")
                (temporary / "run.json").write_text(
                    json.dumps({"step": self.step, "options": self.identity}, indent=2) + "\n"
                )
            for other in _checkpoints(self.output):
                if other != final and (kept := remove_directory(other, _foreign)):
                    notice(f"{other} is kept: {kept}.")
            self._save_head(averaged)
        self._saved = self.step
        self.accelerator.wait_for_everyone()

    def _save_head(self, head: ExitHead) -> None:
        if not self._own_head:
            _check_head(self.output)  # a head may have appeared in the meantime
        self._own_head = True
        with saving(self.output / exit_head_file.WEIGHTS_FILE):
            save_exit_head(head, self.output)

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        remove_leftovers(self.output)
        check_output(self.output)
        checkpoints = _checkpoints(self.output)
        self._own_head = bool(checkpoints) or self.metrics.path.exists()
        if not checkpoints:
            self.metrics.start(-1)
            return
        newest = checkpoints[-1]
        remedy = (
            f"delete {newest}; the next run starts from the previous checkpoint or from scratch"
        )
        run = read_json_object(newest / "run.json", remedy)
        step = run.get("step")
        stored_options = run.get("options")
        if (
            not isinstance(stored_options, dict)
            or type(step) is not int
            or newest.name != f"checkpoint-{step}"
        ):
            raise damaged(newest / "run.json", remedy)
        changed = first_difference(*map(self._fixed, (stored_options, self.identity)))
        if changed:
            raise EESDError(
                f"{self.output} has a run with other options ({changed}); give the same "
                "options to continue it, or another --output."
            )
        self._load_head(newest / "head.safetensors", remedy)
        if self._means:
            with self._averaged():
                self._load_head(newest / "average.safetensors", remedy)
        self._load_optimizers(newest / "optimizer.safetensors", remedy)
        if self.accelerator.is_main_process:
            # The run may have been killed between the checkpoint and the head.
            self._save_head(self.full_head())
        self.step = step
        self._saved = step
        self.metrics.start(self.step)

    def _fixed(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that a continued run must keep. At a constant learning rate, the run
        may have more steps and more data."""
        return options | {"steps": 0, "data": ""} if self.options.cooldown == 0 else options

    def _load_head(self, path: Path, remedy: str) -> None:
        state = load_tensors(path, remedy)
        shapes, wanted = (
            {name: value.shape for name, value in of.items()}
            for of in (state, self.head.state_dict())
        )
        if shapes != wanted:
            raise damaged(path, remedy)
        self.head.load_state_dict(state)

    def _load_optimizers(self, path: Path, remedy: str) -> None:
        stored = load_tensors(path, remedy)
        used = 0
        for number, optimizer in enumerate(self._own_optimizers):
            state = optimizer.state_dict()
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            for index, parameter in enumerate(parameters):
                names = _STATES[type(optimizer)]
                values = {name: stored.get(f"{number}|{index}|{name}") for name in names}
                wanted = [() if name == "step" else parameter.shape for name in names]
                if [None if value is None else value.shape for value in values.values()] != wanted:
                    raise damaged(path, remedy)
                state["state"][index] = values
                used += len(names)
            optimizer.load_state_dict(state)
        if used != len(stored):
            raise damaged(path, remedy)
