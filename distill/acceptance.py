"""What drafting with a head would accept, from one parallel pass over the model's own greedy text.

For given tokens, drafting computes what a parallel pass computes (see ``reach`` in ``losses.py``), and a greedy draft is
accepted where the head's likeliest token is the next token of the model's greedy text. So one bit for each position says all:
rounds of any length are replayed from them, and the counts are those of the runtime's statistics. Up to the first rejection,
what a round's drafts show of themselves is what the same pass shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from eesd.common.files import written_whole
from eesd.common.geometry import Geometry
from eesd.distill.generate import continue_prompts
from eesd.distill.teacher import CHUNK, Teacher, whole_text
from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitHead

DEPTHS = 8
"""Drafted tokens a round in validation."""


@dataclass(frozen=True)
class Acceptance:
    """``offered`` and ``accepted`` drafts by depth, and the tokens that the rounds brought. As in the runtime's statistics,
    what follows a rejection is not judged."""

    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds: int
    tokens: int

    @property
    def by_depth(self) -> list[float]:
        """Probability that a draft is accepted where all before it were, for each depth."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class Round(NamedTuple):
    """A round whose first draft is token ``start`` of the text: how many it drafts and how many of them are accepted."""

    start: int
    drafted: int
    accepted: int

    @property
    def judged(self) -> int:
        """The accepted drafts and the first rejected one."""
        return min(self.drafted, self.accepted + 1)


def rounds_over(bits: NDArray[np.bool_], depth: int) -> Iterator[Round]:
    """Rounds of ``depth`` drafts over a text of which bit i says that the head gets token i right; never of the last."""
    at = 0
    while at < len(bits):
        drafted = min(depth, len(bits) - at - 1)
        right = next((i for i in range(drafted) if not bits[at + i]), drafted)
        yield Round(at, drafted, right)
        at += right + 1


def replay(texts: Sequence[NDArray[np.bool_]], depth: int) -> Acceptance:
    """The counts of rounds of ``depth`` drafts over all texts."""
    offered, accepted = [0] * depth, [0] * depth
    rounds = 0
    for bits in texts:
        for found in rounds_over(bits, depth):
            for level in range(found.judged):
                offered[level] += 1
                accepted[level] += level < found.accepted
            rounds += 1
    return Acceptance(tuple(offered), tuple(accepted), rounds, sum(map(len, texts)))


@dataclass(frozen=True)
class Drafts:
    """The head's greedy draft for each token of a text [T]: whether it is that token, its probability, and its margin (nats)
    over the second likeliest."""

    right: NDArray[np.bool_]
    probability: NDArray[np.float32]
    margin: NDArray[np.float32]


@dataclass(frozen=True)
class Validation:
    """Prompts with the model's greedy continuations: ``tokens`` [P, T], where the continuations begin and end [P], and the
    hidden states [P, T, hidden] after each exit layer."""

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    hidden: dict[int, Tensor]

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        layers: Sequence[int],
        eos_token_ids: Sequence[int],
        batch: int = 16,
    ) -> "Validation":
        """Continue the prompts greedily and note the hidden states, in the decoder's own precision."""
        greedy = torch.zeros(len(prompts))
        tokens, ends = continue_prompts(decoder, prompts, new_tokens, greedy, torch.Generator(), eos_token_ids)
        weight = decoder.lm_head.weight
        precision = "bf16" if weight.dtype == torch.bfloat16 else "float32"
        teacher = Teacher(decoder, layers, 1, precision)
        passes = [teacher(part.to(weight.device))[0] for part in torch.split(tokens, batch)]
        hidden = {layer: torch.cat([found[layer] for found in passes]).cpu() for layer in layers}
        return cls(tokens, torch.tensor([len(prompt) for prompt in prompts]), ends, hidden)

    def save(self, path: Path) -> None:
        state = {f"hidden.{layer}": states for layer, states in self.hidden.items()}
        with written_whole(path) as temporary:
            save_file(state | {"tokens": self.tokens, "starts": self.starts, "ends": self.ends}, temporary)

    @classmethod
    def load(cls, path: Path) -> "Validation":
        state = load_file(path)
        hidden = {int(name.split(".")[1]): states for name, states in state.items() if name.startswith("hidden.")}
        return cls(state["tokens"], state["starts"], state["ends"], hidden)

    @torch.no_grad()
    def drafts(self, head: ExitHead, geometry: Geometry, lm_head: Tensor, batch: int = 16) -> list[Drafts]:
        """For each prompt, what the head would draft for each token of its continuation, in float32."""
        device = lm_head.device
        table = (lm_head if head.lm_head is None else head.lm_head.weight).float()
        found = []
        for hidden in torch.split(self.hidden[head.exit_config.layer], batch):
            inputs, caches = whole_text(geometry, len(hidden), hidden.shape[1], len(head.blocks), torch.float32, device)
            features, _ = head.features(hidden.to(device).float(), inputs, caches)
            chunks = torch.split(features.flatten(0, 1), max(1, CHUNK // len(table)))
            parts = [_likeliest(linear(chunk, table)) for chunk in chunks]
            found.append([torch.cat(part).view(hidden.shape[:2]).cpu() for part in zip(*parts, strict=True)])
        tokens, probability, margin = (torch.cat(part)[:, :-1] for part in zip(*found, strict=True))
        arrays = ((tokens == self.tokens[:, 1:]).numpy(), probability.numpy(), margin.numpy())
        spans = [slice(start - 1, end - 1) for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]
        return [Drafts(*(array[row, span] for array in arrays)) for row, span in enumerate(spans)]

    def bits(self, head: ExitHead, geometry: Geometry, lm_head: Tensor) -> list[NDArray[np.bool_]]:
        """For each prompt, which tokens of its continuation the head would have drafted."""
        return [drafts.right for drafts in self.drafts(head, geometry, lm_head)]

    def acceptance(self, head: ExitHead, geometry: Geometry, lm_head: Tensor, depth: int = DEPTHS) -> Acceptance:
        return replay(self.bits(head, geometry, lm_head), depth)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [n, V]: the likeliest token, its probability, and by how much it leads; each [n]."""
    (first, second), ids = (part.T for part in logits.topk(2))
    return ids[0], (first - logits.logsumexp(-1)).exp(), first - second
