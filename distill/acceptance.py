"""Measure the acceptance of a head's drafts. Rounds are replayed from one parallel pass over the
model's own greedy text.

For the same tokens, a parallel pass computes the same values as drafting. A greedily drafted token
is accepted if it is the next token of the model's greedy text. One bit per position is therefore
enough to replay rounds of any draft length. The counts are the same as in the runtime's statistics.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, pad

from eesd.common.geometry import Geometry
from eesd.controllers.base import DraftStep
from eesd.distill.ages import AGES
from eesd.distill.calibrate import DraftedRound
from eesd.distill.continuing import Writer, Writing, continue_prompts, padded
from eesd.distill.stored import damaged, load_tensors, saved_whole
from eesd.distill.teacher import TeacherCall, chunk_rows, full_sequence_inputs
from eesd.model.decoder import ExitHead

DRAFTS_PER_ROUND = 8
"""Default draft length of the replayed rounds."""
VALIDATION_ROWS = 64
"""Number of validation texts that are decoded in one batch."""


@dataclass(frozen=True)
class Acceptance:
    """Counts over replayed rounds. They are the same as in the runtime's statistics.

    Attributes:
        verified: For each depth, the number of rounds that drafted to this depth and in which all
            earlier drafted tokens were accepted.
        accepted: For each depth, the number of these rounds in which the drafted token at this
            depth was accepted, too.
        rounds: Number of rounds.
        tokens: Number of tokens that the rounds generated.
    """

    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds: int
    tokens: int

    @property
    def by_depth(self) -> list[float]:
        """Probability of acceptance at each depth, given that all earlier drafted tokens were
        accepted."""
        return [a / v if v else 0.0 for a, v in zip(self.accepted, self.verified, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


class ReplayedRound(NamedTuple):
    """One round over a known text.

    Attributes:
        start: Index of the text's token that the first drafted token predicts.
        drafted: Number of drafted tokens.
        accepted: Number of accepted tokens.
    """

    start: int
    drafted: int
    accepted: int

    @property
    def verified(self) -> int:
        """Number of drafted tokens up to and including the first rejected one."""
        return min(self.drafted, self.accepted + 1)


def replay_rounds(correct: NDArray[np.bool_], draft_length: int) -> Iterator[ReplayedRound]:
    """Replay rounds over one text.

    Args:
        correct: Whether the head's draft of token i (after ``a`` drafted tokens) is token i [A, T].
            Larger values of ``a`` are treated as A - 1.
        draft_length: Drafts in a round. The last round has fewer drafts, because each round ends
            with a token of the verifier.

    Yields:
        The rounds, in order.
    """
    start = 0
    ages, tokens = correct.shape
    while start < tokens:
        drafted = min(draft_length, tokens - start - 1)
        accepted = next(
            (i for i in range(drafted) if not correct[min(i, ages - 1), start + i]), drafted
        )
        yield ReplayedRound(start, drafted, accepted)
        start += accepted + 1


def replay_acceptance(
    texts: Sequence[NDArray[np.bool_]], draft_length: int = DRAFTS_PER_ROUND
) -> Acceptance:
    """Count acceptance over several texts.

    Args:
        texts: For each text, whether the head's draft of token i is token i [A, T] (see
            :func:`replay_rounds`).
        draft_length: Drafts in a round.

    Returns:
        The counts for depths 1 to ``draft_length``.
    """
    verified = [0] * draft_length
    accepted = [0] * draft_length
    rounds = 0
    for correct in texts:
        for replayed in replay_rounds(correct, draft_length):
            for level in range(replayed.verified):
                verified[level] += 1
                accepted[level] += level < replayed.accepted
            rounds += 1
    return Acceptance(
        tuple(verified), tuple(accepted), rounds, sum(correct.shape[1] for correct in texts)
    )


@dataclass(frozen=True)
class GreedyDrafts:
    """The head's greedy draft for each token of one text, after 0, 1, ... A - 1 drafted tokens.

    Without deep layers A is 1, because the number of drafted tokens makes no difference. No round
    reaches a draft after a wrong drafted token. Such drafts are not computed, and their values are
    false or 0.

    Attributes:
        correct: Whether the draft is the text's token [A, T].
        probability: The head's probability of the draft [A, T].
        margin: Difference between the logits of the draft and of the second most likely token
            [A, T], in nats.
    """

    correct: NDArray[np.bool_]
    probability: NDArray[np.float32]
    margin: NDArray[np.float32]


def drafted_rounds(
    drafts: GreedyDrafts, draft_length: int = DRAFTS_PER_ROUND
) -> list[DraftedRound]:
    """Replay rounds over one text. The result has the controller's input for each draft up to the
    first rejection.

    Args:
        drafts: The head's drafts.
        draft_length: Drafts in a round.
    """
    return [
        DraftedRound(
            [
                _step(drafts, replayed.start + level, level + 1)
                for level in range(replayed.verified)
            ],
            replayed.accepted,
        )
        for replayed in replay_rounds(drafts.correct, draft_length)
    ]


def _step(drafts: GreedyDrafts, index: int, depth: int) -> DraftStep:
    """Return the draft of one token of the text as a step of a chain."""
    age = min(depth, len(drafts.probability)) - 1
    probability = float(drafts.probability[age, index])
    return DraftStep(
        depth=depth,
        probability=probability,
        path_probability=probability,
        margin=float(drafts.margin[age, index]),
        nodes=depth,
    )


@dataclass(frozen=True)
class ValidationSet:
    """Prompts with the model's greedy continuations.

    Attributes:
        tokens: Prompts and continuations [P, T].
        starts: Index of the first token of each continuation [P].
        ends: Index after the last token of each continuation [P].
        hidden: The hidden states after each exit layer [P, T, hidden], by layer.
        kinds: Kind of each prompt [P]. It is empty if all prompts have the same kind.
    """

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    hidden: dict[int, Tensor]
    kinds: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        writer: Writer,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        eos_token_ids: Sequence[int],
        advance: Callable[[int], None] = lambda _: None,
    ) -> "ValidationSet":
        """Continue the prompts.

        Args:
            writer: The model.
            prompts: Token ids of each prompt.
            new_tokens: Maximum number of tokens to append to each prompt.
            eos_token_ids: Tokens that end a continuation.
            advance: Called with a number of finished continuations.

        Returns:
            The validation set, without hidden states.
        """
        greedy = [0.0] * len(prompts)
        limits = [len(prompt) + new_tokens for prompt in prompts]
        writing = Writing(
            prompts, limits, greedy, np.random.default_rng, eos_token_ids, VALIDATION_ROWS
        )
        texts = continue_prompts(writer, writing, advance)
        tokens, ends = padded(texts, max(map(len, texts)))
        return cls(tokens, torch.tensor([len(prompt) for prompt in prompts]), ends, {})

    def with_states(
        self, teacher: TeacherCall, device: torch.device, batch: int = 16
    ) -> "ValidationSet":
        """Return the same texts with hidden states. A teacher on this device computes them from
        ``batch`` rows at a time."""
        passes = [teacher(part.to(device))[0] for part in torch.split(self.tokens, batch)]
        hidden = {
            layer: torch.cat([states[layer] for states in passes]).cpu() for layer in passes[0]
        }
        return replace(self, hidden=self.hidden | hidden)

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = {f"hidden.{layer}": states for layer, states in self.hidden.items()}
        with saved_whole(path) as temporary:
            save_file(
                tensors | {"tokens": self.tokens, "starts": self.starts, "ends": self.ends},
                temporary,
            )

    @classmethod
    def load(cls, path: Path) -> "ValidationSet":
        """Read a file that :meth:`save` wrote. Raises :class:`EESDError` if it is damaged."""
        tensors = load_tensors(path)
        try:
            tokens, starts, ends = (tensors[name] for name in ("tokens", "starts", "ends"))
            hidden = {
                int(name[7:]): states
                for name, states in tensors.items()
                if re.fullmatch("hidden\\.[0-9]{1,9}", name)
            }
        except KeyError:
            raise damaged(path) from None
        states_fit = all(states.shape[:2] == tokens.shape for states in hidden.values())
        if tokens.ndim != 2 or not states_fit or not starts.shape == ends.shape == tokens.shape[:1]:
            raise damaged(path)
        return cls(tokens, starts, ends, hidden)

    @torch.no_grad()
    def drafts(
        self, head: ExitHead, geometry: Geometry, lm_head: Tensor, batch: int = 16
    ) -> list[GreedyDrafts]:
        """Compute the head's draft for each token of each continuation, in float32.

        Args:
            head: The exit head.
            geometry: Shape of the model.
            lm_head: Rows of the base model's LM head for the head's columns [C, hidden], on the
                head's device. They are not used if the head has a separate LM head.
            batch: Rows in a pass.

        Returns:
            The drafts of each continuation.
        """
        parts = [
            self._drafts_of_rows(head, geometry, lm_head, rows)
            for rows in torch.split(torch.arange(len(self.tokens)), batch)
        ]
        arrays = [torch.cat(part, 1).numpy() for part in zip(*parts, strict=True)]
        spans = [
            slice(start - 1, end - 1)
            for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        ]
        return [
            GreedyDrafts(*(array[:, row, span] for array in arrays))
            for row, span in enumerate(spans)
        ]

    def _drafts_of_rows(
        self, head: ExitHead, geometry: Geometry, lm_head: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the fields of :class:`GreedyDrafts` for some texts [A, B, T].

        A draft after ``a`` drafted tokens is reached if these tokens are accepted, that is, if the
        previous position is correct at age a - 1.
        """
        device = lm_head.device
        config = head.exit_config
        x, *deep = (
            self.hidden[layer][rows].to(device).float() for layer in (config.layer, *config.deep)
        )
        inputs, caches = full_sequence_inputs(
            geometry, len(rows), x.shape[1], len(head.blocks), torch.float32, device
        )
        attended = head.attend(x, inputs, caches)
        states = head.deep_states(deep) if deep else None
        wanted = head.columns(self.tokens[rows, 1:].to(device)).cpu()
        at = torch.arange(wanted.shape[1])
        ages = AGES if deep else 1
        reached = (at >= self.starts[rows, None] - 1) & (at < self.ends[rows, None] - 1)
        done, correct = torch.zeros(2, ages, *reached.shape, dtype=torch.bool)
        probability, margin = torch.zeros(2, ages, *reached.shape)
        for step in range(len(at)):
            age = min(step, ages - 1)
            row, position = cell = torch.nonzero(reached & ~done[age], as_tuple=True)
            if not len(row):
                break
            root = position - age
            state = (
                None
                if states is None
                else states[row, (root - 1).clamp_min(0)] * (root > 0).to(device)[:, None]
            )
            columns, *scores = _greedy_columns(head, lm_head, head.finish(attended[cell], state))
            done[age][cell] = True
            correct[age][cell] = columns == wanted[cell]
            probability[age][cell], margin[age][cell] = scores
            reached = pad((reached & correct[age])[:, :-1], (1, 0))
        return correct, probability, margin

    def correct_drafts(
        self, head: ExitHead, geometry: Geometry, lm_head: Tensor
    ) -> list[NDArray[np.bool_]]:
        """Return whether the head's draft of token i is token i [A, T], for each continuation. The
        arguments are those of :meth:`drafts`."""
        return [drafts.correct for drafts in self.drafts(head, geometry, lm_head)]


def acceptance_by_kind(
    texts: Sequence[NDArray[np.bool_]], kinds: Sequence[str]
) -> dict[str, Acceptance]:
    """Return the counts of :func:`replay_acceptance` for the texts of each kind. The kinds are in
    the order of their names."""
    found: dict[str, list[NDArray[np.bool_]]] = {}
    for kind, text in zip(kinds, texts, strict=False):
        found.setdefault(kind, []).append(text)
    return {kind: replay_acceptance(found[kind]) for kind in sorted(found)}


def _greedy_columns(
    head: ExitHead, lm_head: Tensor, features: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most likely column for each input of the LM head [n, hidden], the probability of
    this column, and its margin. The results are [n], on the CPU."""
    weight = (lm_head if head.lm_head is None else head.lm_head.weight).float()
    found = []
    for chunk in torch.split(features, chunk_rows(len(weight), features.device)):
        logits = linear(chunk, weight)
        (first, second), ids = (part.T for part in logits.topk(2))
        found.append(
            (ids[0].cpu(), (first - logits.logsumexp(-1)).exp().cpu(), (first - second).cpu())
        )
    columns, probability, margin = (torch.cat(part) for part in zip(*found, strict=True))
    return columns, probability, margin
