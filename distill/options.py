"""Options of a run. The command checks the range of each option, and this module checks the rest.
It needs no torch."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError

STARTS = (
    *(
        "",
        "",
        "",
        "",
        "Explain ",
        "What is ",
        "Who ",
        "How do I ",
        "Write a short story about ",
        "Write an email ",
    ),
    *(
        "Write a Python function ",
        "Summarize the following text: ",
        "Rewrite this text: ",
        "Translate German to English: ",
    ),
    *(
        "Answer the question using this passage.\n\nPassage: ",
        "Solve this problem step by step: ",
        "Imagine you are ",
    ),
    *("Compare ", "List ", "Make a table of ", "Extract the names from this text: "),
)
"""Beginnings of the prompts that a model writes. They cover common tasks, and are used in
rotation."""
PRECISIONS = ("bf16", "float32")


@dataclass(frozen=True)
class LossOptions:
    """Weights of the losses. Each loss is a mean over tokens.

    Attributes:
        ce: Weight of the cross-entropy on the teacher's most likely token.
        kl: Weight of the KL divergence from the teacher's distribution. The distribution has the
            teacher's top k tokens, and all other tokens together are one more outcome.
        tv: Weight of the total variation distance from the same distribution.
    """

    ce: float = 0.5
    kl: float = 1.0
    tv: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ce, self.kl, self.tv) < 0 or not self.ce + self.kl + self.tv:
            raise EESDError("Loss weights must be 0 or above; give --ce, --kl or --tv above 0.")


@dataclass(frozen=True)
class TrainingOptions:
    """Options that determine a training run. The same options and data give the same losses,
    whether or not the run was resumed.

    Attributes:
        exit_layer: N, the number of base layers before the head.
        blocks: E, the number of decoder blocks in the head.
        own_lm_head: Whether the head trains its own LM head.
        draft_vocab: Vd, the number of tokens that the head can predict, or 0 for the whole
            vocabulary.
        deep: Deep layers. The draft reads the states that these layers computed for committed
            tokens.
        mlp: Width of the MLPs of the head's blocks. 0 stands for no MLPs, and None for the width in
            the model.
        losses: Weights of the losses.
        steps: Number of optimizer steps. With 0, nothing is trained.
        batch: Number of rows in a forward pass on each process.
        accumulate: Number of forward passes in a step.
        length: Number of tokens in a row.
        lr: Peak learning rate.
        warmup: Fraction of the steps with a rising learning rate.
        cooldown: Fraction of the steps with a falling learning rate.
        clip: Maximum norm of the gradient.
        precision: ``bf16`` (autocast) or ``float32``.
        top_k: Number of the teacher's most likely tokens that are kept for each position.
        mix_share: Fraction of each batch that is mixed-in text.
        seed: Seed of the row order, of prompt selection and of self-generation.
    """

    exit_layer: int
    blocks: int = 1
    own_lm_head: bool = False
    draft_vocab: int = 0
    deep: tuple[int, ...] = ()
    mlp: int | None = None
    losses: LossOptions = LossOptions()
    steps: int = 4000
    batch: int = 8
    accumulate: int = 1
    length: int = 256
    lr: float = 3e-3
    warmup: float = 0.01
    cooldown: float = 0.55
    clip: float = 1.0
    precision: str = "bf16"
    top_k: int = 64
    mix_share: float = 0.25
    seed: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states the head reads. The exit layer comes first, then the deep
        layers."""
        return (self.exit_layer, *self.deep)

    def __post_init__(self) -> None:
        if self.draft_vocab == 1:
            raise EESDError("--draft-vocab must be at least 2, or 0 for all tokens; 1 was given.")


@dataclass(frozen=True)
class DataOptions:
    """Training and validation data of a run.

    Attributes:
        files: Files of rows to train on.
        prompts: Files of prompts that the model continues into ``own_rows`` rows. Used instead of
            ``files``.
        self_prompt: Number of prompts that the model writes itself, in addition to the prompts in
            ``prompts``.
        self_prompt_start: Beginnings of these prompts, which are used in rotation.
        mixed: Files of ground-truth text to mix in.
        own_text: Directory of the generated rows.
        own_rows: Number of rows to generate.
        own_batch: Number of rows that are generated at a time.
        temperatures: Temperatures of the generated rows, which use them in rotation.
        prompt_tokens: Number of tokens in a prompt that is cut from text.
        validation: Files of validation prompts. Without such files, some training rows are held
            out.
        validation_prompts: Maximum number of validation prompts.
        validation_tokens: Number of tokens that the model appends to each validation prompt.
    """

    files: tuple[Path, ...]
    prompts: tuple[Path, ...]
    self_prompt: int
    self_prompt_start: tuple[str, ...]
    mixed: tuple[Path, ...]
    own_text: Path
    own_rows: int
    own_batch: int
    temperatures: tuple[float, ...]
    prompt_tokens: int
    validation: tuple[Path, ...]
    validation_prompts: int
    validation_tokens: int


@dataclass(frozen=True)
class Intervals:
    """Steps between logged metrics, validations, and checkpoints. They do not affect the result of
    the training."""

    log: int = 50
    validate: int = 500
    save: int = 500


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Describe the first entry (by name) that differs between two nested dictionaries.

    Args:
        old: The stored options.
        new: The options of this run.

    Returns:
        A text ``name: old value, now new value``, or None if the dictionaries are equal.
    """
    for name in sorted(old.keys() | new.keys()):
        before = old.get(name)
        now = new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            nested = first_difference(before, now)
            if nested is not None:
                return f"{name}.{nested}"
        elif before != now:
            return f"{name}: {before}, now {now}"
    return None


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, such as the options that files are named after."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
