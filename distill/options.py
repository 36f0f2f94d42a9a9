"""What a training run is made of, checked before anything loads."""

from dataclasses import asdict, dataclass
from typing import Any

from eesd.common.errors import EESDError

OPTIMIZERS = ("muon", "adamw")
PRECISIONS = ("bf16", "float32")


@dataclass(frozen=True)
class Losses:
    """Weights of the losses, all means over tokens.

    ``ce``: cross-entropy on the teacher's likeliest token; ``kl``: KL divergence from its distribution, cut to its ``top_k``
    tokens, both sides at ``temperature`` (Hinton et al. 2015: times its square); ``text``: cross-entropy on the text's own next
    token, for which no teacher is needed; ``hidden``: smooth L1 between what the head's and the teacher's LM heads get.

    ``unroll`` > 1 is multi-step training: see ``reach`` in ``losses.py``. A step ``i`` deep counts ``unroll_decay ** i``.
    """

    ce: float = 0.5
    kl: float = 1.0
    text: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0
    unroll: int = 1
    unroll_decay: float = 0.8

    def __post_init__(self) -> None:
        weights = (self.ce, self.kl, self.text, self.hidden)
        if min(weights) < 0 or not sum(weights):
            raise EESDError("No loss is left to train on: give one of --ce, --kl, --text-ce, --hidden a weight above 0.")
        if self.temperature <= 0:
            raise EESDError(f"--kl-temperature must be above 0; {self.temperature} was given.")
        if self.unroll < 1 or not 0 < self.unroll_decay <= 1:
            raise EESDError("--unroll must be at least 1 and --unroll-decay above 0 and at most 1.")


@dataclass(frozen=True)
class Training:
    """One run, up to the data: with the same options it gives the same losses, resumed or not.

    ``batch`` rows of ``length`` tokens make a forward pass on each process, ``accumulate`` passes a step. ``mix_share`` is the
    part of the rows that come from the mixed-in text. ``warmup`` and ``cooldown`` are parts of ``steps``; 0 steps
    train nothing.
    """

    exit_layer: int
    blocks: int = 1
    own_lm_head: bool = False
    losses: Losses = Losses()
    steps: int = 4000
    batch: int = 8
    accumulate: int = 1
    length: int = 256
    lr: float = 3e-3
    warmup: float = 0.01
    cooldown: float = 0.55
    optimizer: str = "muon"
    clip: float = 1.0
    precision: str = "bf16"
    top_k: int = 64
    mix_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch", 1), ("accumulate", 1), ("top_k", 1)):
            if getattr(self, name) < least:
                raise EESDError(f"--{name.replace('_', '-')} must be at least {least}; {getattr(self, name)} was given.")
        if self.length < 2:
            raise EESDError(f"--length must be at least 2; {self.length} was given.")
        if not 0 <= self.mix_share < 1:
            raise EESDError(f"--mix-share must be at least 0 and below 1; {self.mix_share} was given.")
        if self.lr <= 0 or self.clip <= 0:
            raise EESDError("--lr and --clip must be above 0.")
        if self.optimizer not in OPTIMIZERS or self.precision not in PRECISIONS:
            raise EESDError(f"--optimizer is one of {', '.join(OPTIMIZERS)}, --precision one of {', '.join(PRECISIONS)}.")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Every:
    """Steps between lines of figures, validations, and checkpoints. They do not change what is trained."""

    log: int = 50
    validate: int = 500
    save: int = 500

    def __post_init__(self) -> None:
        if min(self.log, self.validate, self.save) < 1:
            raise EESDError("--log-every, --eval-every and --save-every must be at least 1.")


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first option that differs, as ``name: old, now new``."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            inner = difference(before, now)
            if inner is not None:
                return f"{name}.{inner}"
        elif before != now:
            return f"{name}: {before}, now {now}"
    return None


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up, plateau, linear descent to 2 % of ``lr`` over the last ``cooldown`` of the steps; steps count from 0."""
    warm = (step + 1) / max(1.0, training.warmup * training.steps)
    left = (training.steps - step) / training.steps
    falling = 0.02 + 0.98 * left / training.cooldown if training.cooldown else 1.0
    return training.lr * min(1.0, warm, falling)
