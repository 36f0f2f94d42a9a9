"""From the command's options to rows, targets and validation. The teacher loads only when something is missing."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.distill.acceptance import Validation
from eesd.distill.data import Rows, check_vocabulary, documents, encode_line, joined, json_lines, read_rows
from eesd.distill.generate import Generation, self_generate
from eesd.distill.options import Training
from eesd.distill.sources import Cache, Online, Source, cache_meta
from eesd.distill.teacher import Teacher
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder
from eesd.runtime.text import TextCodec

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""A progress bar: label and total give what is called with each advance."""


@dataclass(frozen=True)
class Data:
    """What to train on and to validate with.

    ``files`` are rows as they are; ``prompts`` are continued by the model into ``own_rows`` rows, kept in ``own_text``;
    ``mixed`` is ground-truth text. Prompts from text are passages of ``prompt_tokens`` tokens. Validation continues
    ``validation_prompts`` prompts by ``validation_tokens`` tokens.
    """

    files: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    mixed: tuple[Path, ...] = ()
    own_text: Path | None = None
    own_rows: int = 4096
    own_batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    prompt_tokens: int = 32
    validation: tuple[Path, ...] = ()
    validation_prompts: int = 64
    validation_tokens: int = 128

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.validation_prompts < 1 or self.validation_tokens < 2:
            raise EESDError("--prompt-tokens and --validation-prompts must be at least 1, --validation-tokens at least 2.")


class Preparation:
    """The model's parts as a run needs them, each loaded at its first use."""

    def __init__(
        self, checkpoint: Checkpoint, accelerator: Accelerator, training: Training, dtype: torch.dtype, compiled: bool, bar: Bar
    ) -> None:
        self.checkpoint, self.accelerator, self.training = checkpoint, accelerator, training
        self.dtype, self.compiled, self.bar = dtype, compiled, bar
        self.base = checkpoint.fingerprint()

    @cached_property
    def codec(self) -> TextCodec | None:
        directory = self.checkpoint.directory
        return TextCodec(directory) if (directory / "tokenizer.json").exists() else None

    @cached_property
    def decoder(self) -> Decoder:
        return self.checkpoint.decoder(self.dtype).to(self.accelerator.device)

    def teacher(self, layers: Sequence[int]) -> Callable[[Tensor], Any]:
        teacher = Teacher(
            self.decoder, layers, self.training.top_k, self.training.precision, final=self.training.losses.hidden > 0
        )
        if self.compiled:
            teacher.compile(dynamic=False)
        return teacher

    def rows(self, data: Data) -> Rows:
        """All rows to train on; own text is generated first where it is missing."""
        vocabulary, length = self.checkpoint.geometry.vocab_size, self.training.length
        files = data.files or self._generated(data)
        own = read_rows(files, self.codec, vocabulary, length)
        return joined(own, read_rows(data.mixed, self.codec, vocabulary, length) if data.mixed else None)

    def _generated(self, data: Data) -> tuple[Path, ...]:
        assert data.own_text is not None
        prompts = self.prompts(data.prompts, data.prompt_tokens, data.own_rows)
        generation = Generation(
            data.own_rows,
            data.own_batch,
            self.training.length,
            data.temperatures,
            self.training.seed,
            _digest(prompts),
            self.base,
        )
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        with self.bar("own text", data.own_rows) as advance:
            eos = self.checkpoint.config.eos_token_ids
            self_generate(self.decoder, prompts, generation, data.own_text, eos, advance, process, processes)
        self.accelerator.wait_for_everyone()
        return tuple(sorted(data.own_text.glob("shard-*.safetensors")))

    def prompts(self, paths: Sequence[Path], prompt_tokens: int, count: int) -> list[list[int]]:
        """At most ``count`` prompts: the lines of ``.jsonl`` files, passages from anything else."""
        found: list[list[int]] = []
        rng = np.random.default_rng(self.training.seed)
        longest = self.training.length * 3 // 4
        for path in paths:
            if path.suffix == ".jsonl":
                if self.codec is None:
                    raise EESDError(f"{path} is text and the model directory has no tokenizer.json; give token arrays.")
                found += [encode_line(path, line, self.codec)[-longest:] for line in json_lines(path)]
                continue
            texts = [np.asarray(text) for text in documents(path, self.codec) if len(text) >= prompt_tokens]
            size = np.asarray([len(text) for text in texts], np.float64)
            for index in rng.choice(len(texts), count, p=size / size.sum()) if texts else ():
                start = int(rng.integers(0, len(texts[index]) - prompt_tokens + 1))
                found.append(texts[index][start : start + prompt_tokens].tolist())
        found = [prompt for prompt in found if prompt]
        if not found:
            raise EESDError(f"There are no prompts in {', '.join(map(str, paths))}; give JSON lines or longer texts.")
        check_vocabulary(np.concatenate(found).astype(np.int32), self.checkpoint.geometry.vocab_size, str(paths[0]))
        chosen = rng.permutation(len(found))[:count] if len(found) > count else range(len(found))
        return [found[int(index)] for index in chosen]

    def source(self, rows: Rows, layers: Sequence[int], offline: Path | None) -> Source:
        """Batches of these rows: from the teacher, or from a cache that is filled first."""
        training, geometry = self.training, self.checkpoint.geometry
        if offline is None:
            return Online(rows, self.teacher(layers), self.accelerator.device)
        top_k = min(training.top_k, geometry.vocab_size)
        meta = cache_meta(self.base, layers, top_k, training.precision, training.losses.hidden > 0)
        cache = Cache(offline, rows, meta)
        missing = cache.missing()
        if missing:
            process, processes = self.accelerator.process_index, self.accelerator.num_processes
            with self.bar("teacher's targets", len(missing) // processes) as advance:
                cache.fill(
                    self.teacher(layers), self.accelerator.device, geometry.hidden_size, training.batch,
                    lambda _: advance(1), process, processes,
                )  # fmt: skip
        self.accelerator.wait_for_everyone()
        return cache

    def validation(self, data: Data, rows: Rows, layers: Sequence[int], directory: Path) -> tuple[Validation, Rows]:
        """The validation set, and the rows that are left to train on where it was taken from them."""
        if data.validation:
            prompts = self.prompts(data.validation, data.prompt_tokens, data.validation_prompts)
        else:
            held = min(data.validation_prompts, rows.own // 10)
            if not held:
                raise EESDError(f"There are only {rows.own} rows to train on; give more data, or --validation FILE.")
            prompts = [rows.tokens[i, : min(data.prompt_tokens, int(rows.lengths[i]))].tolist() for i in range(held)]
            rows = replace(rows, tokens=rows.tokens[held:], lengths=rows.lengths[held:], own=rows.own - held)
        room = self.checkpoint.config.max_positions - max(map(len, prompts))
        if room < 2:
            raise EESDError(f"A validation prompt leaves {room} of the model's positions free; give shorter ones.")
        name = _digest([self.base, prompts, data.validation_tokens, sorted(layers), str(self.dtype)])[:16]
        path = directory / f"validation-{name}.safetensors"
        if self.accelerator.is_main_process and not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            new_tokens, eos = min(room, data.validation_tokens), self.checkpoint.config.eos_token_ids
            Validation.make(self.decoder, prompts, new_tokens, layers, eos).save(path)
        self.accelerator.wait_for_everyone()
        return Validation.load(path), rows


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
