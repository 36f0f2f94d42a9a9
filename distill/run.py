"""Run one ``eesd-distill`` command. This module checks the options, makes the parts of the run,
trains the head and evaluates it.

The base model is loaded only if generated rows, targets or the validation set are missing.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers, temporary_beside, written_whole
from eesd.common.geometry import ExitConfig
from eesd.common.integrity import sha256_of
from eesd.common.outputs import existing_parent
from eesd.common.terminal import notice
from eesd.distill.acceptance import Acceptance, ValidationSet, drafted_rounds, replay_acceptance
from eesd.distill.calibrate import CalibrationResult, calibrate, label_rounds
from eesd.distill.continuing import TorchWriter, Writer
from eesd.distill.data import (
    Prompt,
    Rows,
    add_mixed_rows,
    count_next_tokens,
    most_used,
    prompt_order,
    prompts_of_rows,
    read_prompts,
    read_rows,
    shard_name,
)
from eesd.distill.generate import GenerationOptions, self_generate
from eesd.distill.options import DataOptions, Intervals, LossOptions, TrainingOptions, digest
from eesd.distill.own_engine import EngineTeacher, EngineWriter
from eesd.distill.portions import FIRST, Portion, portions, time_left
from eesd.distill.self_prompt import SHARD_TRIES, SelfPromptOptions, around_turns, self_prompts
from eesd.distill.stored import saving
from eesd.distill.structure import structure
from eesd.distill.teacher import (
    SHARD_ROWS,
    OnlineTargets,
    TargetCache,
    TargetSource,
    Teacher,
    TeacherCall,
)
from eesd.distill.trainer import Report, Trainer, check_output
from eesd.model.arrays import to_float32
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import ModelConfig
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.exit_head_file import CONFIG_FILE, WEIGHTS_FILE, read_exit_config, save_config
from eesd.model.hub import find_head, find_model
from eesd.model.initial_head import check_exit
from eesd.model.loading import load_decoder, load_exit_head, make_initial_head, save_exit_head
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.engines import operators
from eesd.runtime.text import TextCodec

SLOWLY = "torch runs the model, several times slower than this project's operators."
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""A function that opens a progress bar with a label and a total. It returns a function that
advances the bar."""


@dataclass(frozen=True)
class Run:
    """The options of a run, and the parts of the run, which are made from the options on first use.

    Attributes:
        checkpoint: The base model.
        accelerator: Distributes the run over processes.
        training: Options of the training.
        data: Options of the data.
        output: Output directory.
        offline: Directory of the target cache, or None to run the teacher on each batch.
        init_head: Directory of the head to start from, or None to start from the model's last
            layers.
        intervals: Steps between logged metrics, validations and checkpoints.
        dtype: Element type of the base model's weights.
        progress: Opens progress bars.
        resources: Resources of this process. They are kept until the command ends.
    """

    checkpoint: Checkpoint
    accelerator: Accelerator
    training: TrainingOptions
    data: DataOptions
    output: Path
    offline: Path | None
    init_head: Path | None
    intervals: Intervals
    dtype: torch.dtype
    progress: ProgressBar
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and messages."""
        return bool(self.accelerator.is_main_process)

    @cached_property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer, if it has one."""
        files = resolved_tokenizer(self.checkpoint.path)
        with tempfile.TemporaryDirectory() as directory:
            for name, content in files.items():
                with saving(Path(directory) / name):
                    (Path(directory) / name).write_bytes(content)
            return TextCodec(Path(directory)) if files else None

    @cached_property
    def decoder(self) -> Decoder:
        """The base model, on this process's device."""
        return load_decoder(self.checkpoint, self.dtype).to(self.accelerator.device)

    def lm_head(self, head: ExitHead) -> Tensor:
        """Return the rows of the base model's LM head for the head's columns ([C, hidden], float32,
        on this process's device). The result is empty if the head has a separate LM head."""
        device = self.accelerator.device
        if self.training.own_lm_head:
            return torch.zeros(0, self.checkpoint.geometry.hidden_size, device=device)
        return head.rows_of(as_torch(to_float32(self.checkpoint.lm_head()))).to(device)

    @property
    def _in_portions(self) -> bool:
        """Whether training begins with a part of the text and caches the teacher's targets. On a
        GPU the model writes and reads all text in less time than startup takes."""
        one = self.accelerator.num_processes == 1
        on_cpu = self.accelerator.device.type == "cpu"
        return one and on_cpu and self.training.steps > 0 and not self.data.mixed

    @cached_property
    def portions(self) -> list[Portion]:
        """The portions of the training. Portions of own text are whole shards."""
        files = self.data.files
        size = self._file_rows.num_primary if files else self.data.own_rows
        first = size
        if self._in_portions:
            shard = 1 if files else self._generation.shard_rows
            first = FIRST if self.data.validation else 2 * FIRST  # validation may take half
            first = -(-first // shard) * shard
        return portions(size, self.training.steps, first)

    @cached_property
    def _file_rows(self) -> Rows:
        """The rows of ``--data``, and the mixed-in rows."""
        return self._with_mixed(self._read_rows(self.data.files))

    @cached_property
    def _mixed_rows(self) -> Rows | None:
        """The rows of ``--mix``."""
        return self._read_rows(self.data.mixed) if self.data.mixed else None

    def _read_rows(self, paths: Sequence[Path]) -> Rows:
        vocab_size = self.checkpoint.geometry.vocab_size
        return read_rows(paths, self.codec, vocab_size, self.training.length)

    def _with_mixed(self, rows: Rows) -> Rows:
        return rows if self._mixed_rows is None else add_mixed_rows(rows, self._mixed_rows)

    def rows(self, portion: Portion) -> tuple[Rows, int]:
        """Read the rows of a portion, including the validation rows. If the rows are the model's
        own text, missing rows are written first.

        Returns:
            All rows that exist, and the number of primary rows that belong to the portion.
        """
        if self.data.files:
            rows = self._file_rows
            return rows, min(portion.size, rows.num_primary)
        _ = self._mixed_rows  # errors are raised before the model writes text
        files = self._write_rows(portion.size)
        count = len(self._read_rows(files))
        # A stopped run may have written more rows, whose targets are in the cache.
        while (following := self.data.own_text / shard_name(len(files))).exists():
            files.append(following)
        return self._with_mixed(self._read_rows(files)), count

    @cached_property
    def _generation(self) -> GenerationOptions:
        """The options of the model's own text."""
        data = self.data
        own = [data.self_prompt, data.self_prompt_start, SHARD_TRIES]
        return GenerationOptions(
            rows=data.own_rows,
            batch=data.own_batch,
            length=self.training.length,
            temperatures=data.temperatures,
            seed=self.training.seed,
            prompts=digest([self._given_prompts, own]),
            base=self.checkpoint.fingerprint(),
        )

    @cached_property
    def _given_prompts(self) -> list[list[int]]:
        """The prompts in the given files."""
        data = self.data
        read = self._prompts(data.prompts, data.own_rows) if data.prompts else []
        return [prompt.tokens for prompt in read]

    def _write_rows(self, count: int) -> list[Path]:
        """Let the model write the missing rows among the first rows of its own text. Return the
        files."""
        data = self.data
        given = self._given_prompts
        order = prompt_order(count, len(given), data.self_prompt, self.training.seed)
        writer = self._writer()
        prompts = given + self._write_prompts(writer, int(order.max()) + 1 - len(given))
        with self.progress("own text", count) as advance:
            paths = self_generate(
                writer,
                [prompts[index] for index in order],
                self._generation,
                data.own_text,
                self.checkpoint.config.eos_token_ids,
                advance,
                self.accelerator.process_index,
                self.accelerator.num_processes,
            )
        self.accelerator.wait_for_everyone()
        return paths

    @cached_property
    def _engine_directory(self) -> Path:
        """Directory of the engine that writes and reads text in this process. It exists until
        ``resources`` are closed."""
        self.output.mkdir(parents=True, exist_ok=True)
        return self.resources.enter_context(temporary_beside(self.output / "engine"))

    @property
    def _has_operators(self) -> bool:
        """Whether this project's operators run the frozen model."""
        return self.accelerator.device.type == "cpu" and not operators.missing()

    def _writer(self) -> Writer:
        """Return the writer of the model's own text. On a CPU, this project's operators write it
        with the weights as they are stored."""
        if self._has_operators:
            return EngineWriter(self.checkpoint, self._engine_directory, torch.get_num_threads())
        return TorchWriter(self.decoder)

    def _write_prompts(self, writer: Writer, count: int) -> list[list[int]]:
        """Let the model write its first prompts, on the main process."""
        data = self.data
        if count <= 0:
            return []
        assert self.codec is not None  # make_run() has checked it
        options = SelfPromptOptions(
            prompts=data.self_prompt,
            starts=data.self_prompt_start,
            seed=self.training.seed,
            base=self.checkpoint.fingerprint(),
            max_positions=self.checkpoint.config.max_positions,
        )
        with (
            self.accelerator.main_process_first(),
            self.progress("own prompts", count) as advance,
        ):
            paths = self_prompts(
                writer,
                self.codec,
                options,
                data.own_text,
                self.checkpoint.config.eos_token_ids,
                advance,
                data.own_batch,
                count,
            )
        every = len(paths) * SHARD_TRIES
        return [prompt.tokens for prompt in self._prompts(paths, every)][:count]

    def _prompts(self, paths: Sequence[Path], count: int) -> list[Prompt]:
        return read_prompts(
            paths,
            self.codec,
            self.checkpoint.geometry.vocab_size,
            count=count,
            prompt_tokens=self.data.prompt_tokens,
            max_tokens=self.training.length * 3 // 4,
            seed=self.training.seed,
        )

    @cached_property
    def validation(self) -> tuple[ValidationSet, int]:
        """Make or load the validation set. Returns it with the number of rows that its prompts come
        from.

        Raises:
            EESDError: There are too few rows, or a prompt is too long for the model.
        """
        data = self.data
        kinds = tuple[str, ...]()
        held = 0
        if data.validation:
            read = self._prompts(data.validation, data.validation_prompts)
            prompts = [prompt.tokens for prompt in read]
            kinds = tuple(prompt.kind for prompt in read)
        else:
            rows, count = self.rows(self.portions[0])
            every = self._file_rows.num_primary if data.files else data.own_rows
            held = min(data.validation_prompts, every // 10, count // 2)
            if not held:
                raise EESDError(
                    f"There are only {count} rows to train on; give more data, or --validation "
                    "FILE."
                )
            prompts = prompts_of_rows(rows, held, data.prompt_tokens)
        free = self.checkpoint.config.max_positions - max(map(len, prompts))
        if free < 2:
            raise EESDError(
                f"A validation prompt leaves {free} of the model's positions free; give "
                "shorter prompts."
            )
        key = [self.checkpoint.fingerprint(), prompts, data.validation_tokens, str(self.dtype)]
        directory = self.offline or self.output
        path = directory / f"validation-{digest(key)[:16]}.safetensors"
        if self.is_main:
            self._complete_validation(path, prompts, min(free, data.validation_tokens))
        self.accelerator.wait_for_everyone()
        return replace(ValidationSet.load(path), kinds=kinds), held

    def _complete_validation(self, path: Path, prompts: list[list[int]], new_tokens: int) -> None:
        """Make the file of the validation set, or add the states of layers that the file lacks."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            validation = ValidationSet.load(path)
        else:
            eos_token_ids = self.checkpoint.config.eos_token_ids
            with self.progress("validation texts", len(prompts)) as advance:
                validation = ValidationSet.make(
                    self._writer(), prompts, new_tokens, eos_token_ids, advance
                )
        missing = [layer for layer in self.training.layers if layer not in validation.hidden]
        if missing:
            teacher = self._teacher(missing, validation.tokens.shape[1])
            validation.with_states(teacher, self.accelerator.device).save(path)

    def targets(self, rows: Rows, count: int) -> TargetSource:
        """Make the source of training batches. If there is a cache, its missing part is computed
        first.

        Args:
            rows: All existing training rows.
            count: Number of rows that are needed, counted from the first.

        Returns:
            The source.

        Raises:
            EESDError: The cache was made with other data or options, or the disk is too small.
        """
        training = self.training
        geometry = self.checkpoint.geometry
        directory = self.offline
        if directory is None and self._in_portions:
            directory = self.output / "targets"
        if directory is None:
            return OnlineTargets(
                rows, self._teacher(training.layers, training.length), self.accelerator.device
            )
        base = self.checkpoint.fingerprint()
        top_k = min(training.top_k, geometry.vocab_size)
        cache = TargetCache(directory, rows, base, training.layers, top_k, training.precision)
        missing = cache.missing_shards(count)
        if missing:
            process = self.accelerator.process_index
            processes = self.accelerator.num_processes
            total = min(len(missing) * SHARD_ROWS, count) // processes
            with self.progress("teacher's targets", total) as advance:
                teacher = self._teacher(cache.layers, training.length)
                device = self.accelerator.device
                cache.fill(
                    teacher,
                    device,
                    missing,
                    geometry.hidden_size,
                    training.batch,
                    advance,
                    process,
                    processes,
                )
        self.accelerator.wait_for_everyone()
        vars(self).pop("decoder", None)  # free the model's memory for training
        return cache

    def _teacher(self, layers: Sequence[int], slots: int) -> TeacherCall:
        """Return the teacher. On a CPU, this project's operators run it."""
        top_k = self.training.top_k
        precision = self.training.precision
        if self._has_operators:
            threads = torch.get_num_threads()
            return EngineTeacher(
                self.checkpoint, self._engine_directory, layers, top_k, precision, slots, threads
            )
        return Teacher(self.decoder, layers, top_k, precision)

    def given_head(self) -> ExitHead | None:
        """Return the head in ``init_head`` with its draft vocabulary, or None if there is no
        ``init_head``.

        Raises:
            EESDError: Its shape differs from the options.
        """
        if self.init_head is None:
            return None
        head = load_exit_head(self.checkpoint, self.init_head)
        wanted = self.head_config()
        stored = head.exit_config
        if replace(stored, trained=True, calibration=None) != wanted:
            lm_head = "own" if stored.own_lm_head else "shared"
            draft_vocab = (
                f" --draft-vocab {stored.draft_vocab}"
                if stored.draft_vocab or wanted.draft_vocab
                else ""
            )
            deep = (
                f" --deep {','.join(map(str, stored.deep)) or 'none'}"
                if stored.deep != wanted.deep
                else ""
            )
            mlp = f" --mlp {stored.mlp}" if stored.mlp is not None else ""
            raise EESDError(
                f"The head in {self.init_head} was made with --exit-layer {stored.layer} "
                f"--blocks {stored.blocks} "
                f"--{lm_head}-lm-head{draft_vocab}{deep}{mlp}; give these options to start from it."
            )
        head.exit_config = wanted
        return head

    def initial_head(self) -> ExitHead:
        """Return the head before training. It is the head in ``init_head``, or a new head that is
        made from the model's last layers. Its draft vocabulary has the tokens that the first
        portion uses most.

        Raises:
            EESDError: The shape of the head in ``init_head`` differs from the options.
        """
        given = self.given_head()
        ids = None
        if given is not None:
            return given
        if self.training.draft_vocab:
            _, held = self.validation
            rows, count = self.rows(self.portions[0])
            counted = rows if self.data.files else rows.first(count)
            counts = count_next_tokens(counted.without(held), self.checkpoint.geometry.vocab_size)
            eos = self.checkpoint.config.eos_token_ids
            ids = most_used(counts, self.training.draft_vocab, eos)
        return make_initial_head(self.checkpoint, self.head_config(), ids)

    def head_config(self) -> ExitConfig:
        """Return the configuration of the head that the options describe."""
        training = self.training
        base = self.checkpoint.fingerprint()
        return ExitConfig(
            training.exit_layer,
            training.blocks,
            training.own_lm_head,
            base,
            trained=True,
            draft_vocab=training.draft_vocab,
            deep=training.deep,
            mlp=training.mlp,
        )

    def train(self, report: Report, say: Callable[[str], None]) -> None:
        """Train one head.

        Args:
            report: Called with each line of metrics.
            say: Called with a line about the remaining time.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        check_output(self.output)
        self.given_head()  # both checks come first, so that errors appear before the long work
        begun = time.monotonic()
        validation, held = self.validation
        files = self.data.files
        init_head = ""
        if self.init_head:
            init_head = str(self.init_head.resolve())
        identity = {
            "base": self.checkpoint.fingerprint(),
            "data": self._file_rows.digest() if files else digest(asdict(self._generation)),
            "init_head": init_head,
            "processes": self.accelerator.num_processes,
        }
        trainer = Trainer(
            self.accelerator,
            self.initial_head(),
            self.checkpoint.geometry,
            self.lm_head,
            self.training,
            validation,
            self.output,
            identity,
        )
        first = self._read(self.portions[0], held)  # an unusable cache is refused before training
        trainer.begin(report)
        size = 0
        for number, portion in enumerate(self.portions):
            if trainer.step < portion.end:
                used, targets = self._read(portion, held) if number else first
                read = time.monotonic()
                steps = portion.end - trainer.step
                with self.progress(f"training to step {portion.end}", steps) as advance:
                    trainer.run(used, targets, portion.end, self.intervals, report, advance)
                texts = self.portions[-1].size - portion.size
                left = texts * (read - begun) / (portion.size - size)
                left += (self.training.steps - portion.end) * (time.monotonic() - read) / steps
                if texts:
                    say(
                        f"step {portion.end} of {self.training.steps}: {portion.size} of "
                        f"{self.portions[-1].size} rows are in use; {time_left(left)} left"
                    )
            size = portion.size
            begun = time.monotonic()

    def _read(self, portion: Portion, held: int) -> tuple[Rows, TargetSource]:
        """Return the rows of a portion without the first ``held`` rows, and the targets of these
        rows."""
        rows, count = self.rows(portion)
        rows = rows.without(held)
        count = len(rows) if self.data.mixed else count - held
        return rows if self.data.mixed else rows.first(count), self.targets(rows, count)

    def write_initial_head(self) -> None:
        """Copy the head in ``init_head`` into the output directory, unless it is already there.
        Without ``init_head``, the head consists of the model's own norm and LM head, with the draft
        vocabulary of the options.

        Raises:
            EESDError: The shape of the head differs from the options, its weights are not finite,
                or the output directory has another head.
        """
        self._check_head()
        if self.init_head is None:
            head = self.initial_head()
            self._check_head()
            if self.is_main:
                save_exit_head(head, self.output)
            self.accelerator.wait_for_everyone()
            return
        given = self.given_head()
        assert given is not None
        if not all(value.isfinite().all() for value in given.state_dict().values()):
            raise EESDError(
                f"The head in {self.init_head} has weights that are not finite; train it again."
            )
        self.output.mkdir(parents=True, exist_ok=True)
        if self.is_main and not self.output.samefile(self.init_head):
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                with written_whole(self.output / name) as temporary:
                    shutil.copyfile(self.init_head / name, temporary)
        self.accelerator.wait_for_everyone()

    def _check_head(self) -> None:
        """Raise :class:`EESDError` if the output directory has a head that this command would not
        reproduce."""
        weights = self.output / WEIGHTS_FILE
        config = self.output / CONFIG_FILE
        if not weights.exists():
            same = not config.exists()
        elif self.init_head is None:
            same = not read_exit_config(self.output, None).blocks
        else:
            same = sha256_of(weights) == sha256_of(self.init_head / WEIGHTS_FILE)
        if not same:
            raise EESDError(f"{self.output} has another exit head; give another --output.")

    def evaluate(self) -> tuple[Acceptance, CalibrationResult]:
        """Evaluate the head in the output directory, and write its calibration prior into its
        configuration.

        Raises:
            EESDError: The head computes values that are not finite.
        """
        validation, _ = self.validation
        head = load_exit_head(self.checkpoint, self.output).to(self.accelerator.device)
        drafts = validation.drafts(head, self.checkpoint.geometry, self.lm_head(head))
        if not all(np.isfinite(text.margin).all() for text in drafts):
            raise EESDError(
                f"The head in {self.output} computes logits that are not finite; train it again."
            )
        result = calibrate([label_rounds(drafted_rounds(text)) for text in drafts])
        acceptance = replay_acceptance([text.correct for text in drafts])
        if self.is_main:
            save_config(replace(head.exit_config, calibration=result.prior), self.output)
        return acceptance, result


def make_accelerator() -> Accelerator:
    """Return the accelerator of this process. The process runs alone, or was started by torchrun or
    ``accelerate launch``."""
    # Without this, accelerate does not distribute over CPU processes.
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "").lower() == "true":
            raise EESDError(
                "Sharding is not supported, because each process has a copy of the head; "
                f"unset {name}."
            )
    return accelerator


def checked(
    options: dict[str, Any], config: ModelConfig, given: ExitConfig | None
) -> tuple[TrainingOptions, DataOptions]:
    """Check the command's options for training and data.

    Args:
        options: The options of ``eesd-distill``, by parameter name.
        config: Configuration of the model.
        given: Configuration of the head that the run starts from, or None to start from the model's
            last layers.

    Raises:
        EESDError: An option is wrong, or a file is missing.
    """
    losses = LossOptions(options["ce"], options["kl"], options["tv"])
    options = options | structure(options, config.geometry, given)
    same_names = {field.name for field in fields(TrainingOptions)} - {"losses"}
    training = TrainingOptions(**{name: options[name] for name in same_names}, losses=losses)
    renamed = {
        "files": options["data"],
        "prompts": options["self_generate"],
        "mixed": options["mix"],
        "own_text": options["own_text"] or options["output"] / "own-text",
    }
    same_names = {field.name for field in fields(DataOptions)} - renamed.keys()
    given_data = bool(options["data"]), bool(options["self_generate"] or options["self_prompt"])
    if training.steps and not any(given_data):
        options["self_prompt"] = max(1, options["own_rows"] // 2)
    data = DataOptions(**renamed, **{name: options[name] for name in same_names})
    if not training.steps and training.blocks and options["init_head"] is None:
        raise EESDError(
            "--steps 0 trains nothing; give the head to calibrate with --init-head DIR."
        )
    if (
        not training.steps
        and options["init_head"] is None
        and training.draft_vocab
        and not any(given_data)
    ):
        raise EESDError(
            "--draft-vocab takes the tokens that text uses most; give text with --data FILE "
            "or --self-generate FILE."
        )
    if training.steps and not training.blocks:
        raise EESDError(
            "A head without blocks is the model's own norm and LM head; give --steps 0, or "
            "--blocks of at least 1."
        )
    if all(given_data) or not (training.steps or data.validation or any(given_data)):
        raise EESDError(
            "Give either --data FILE (rows to train on), or prompts for the model: "
            "--self-generate FILE or --self-prompt N."
        )
    for path in (*data.files, *data.prompts, *data.mixed, *data.validation):
        if not path.is_file():
            raise EESDError(
                f"{path} is not a file; give a file of text, JSON lines or token arrays."
            )
    if training.draft_vocab >= config.geometry.vocab_size:
        training = replace(training, draft_vocab=0)
    if training.length > config.max_positions:
        raise EESDError(
            f"--length {training.length} exceeds the model's {config.max_positions} "
            "positions; give a lower one."
        )
    return training, data


def make_run(options: dict[str, Any], progress: ProgressBar) -> Run:
    """Check the command's options. This function reads only the headers of the checkpoint.

    Args:
        options: The options of ``eesd-distill``, by parameter name.
        progress: Opens progress bars.

    Returns:
        The run.

    Raises:
        EESDError: An option is wrong, or a file is missing.
    """
    checkpoint = Checkpoint(find_model(options["model"]))
    given = None
    if options["init_head"] is not None:
        options = options | {"init_head": find_head(options["init_head"])}
        given = read_exit_config(options["init_head"], checkpoint.fingerprint())
    training, data = checked(options, checkpoint.config, given)
    output: Path = options["output"]
    accelerator = make_accelerator()
    for directory in filter(None, (output, data.own_text, options["offline"])):
        if not (directory if directory.exists() else existing_parent(directory)).is_dir():
            raise EESDError(f"{directory} is not a directory; give another directory.")
        remove_leftovers(directory)
    on_cpu = accelerator.device.type == "cpu"
    dtype = options["dtype"] or (
        "float32" if on_cpu or training.precision == "float32" else "bfloat16"
    )
    run = Run(
        checkpoint=checkpoint,
        accelerator=accelerator,
        training=training,
        data=data,
        output=output,
        offline=options["offline"],
        init_head=options["init_head"],
        intervals=Intervals(options["log_every"], options["eval_every"], options["save_every"]),
        dtype=getattr(torch, dtype),
        progress=progress,
    )
    if on_cpu and accelerator.is_main_process and operators.missing():
        notice(f"{SLOWLY} {operators.missing()}")
    check_exit(checkpoint.geometry, run.head_config())
    if data.self_prompt:
        if run.codec is None:
            raise EESDError(
                "The model has no tokenizer to write prompts with; give token arrays with "
                "--data FILE."
            )
        try:
            around_turns(run.codec)
        except EESDError:
            raise EESDError(
                "The model has no chat template to write prompts with; give --data FILE or "
                "--self-generate FILE."
            ) from None
    return run
