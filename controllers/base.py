"""What a controller is told, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


class DraftStep(NamedTuple):
    """One draft step, told right after it ran.

    Attributes:
        depth: Levels drafted in this round; 1 after the first step.
        probability: The draft's probability of the token just drafted (tree: of the new level's best node).
        path_probability: Product of the probabilities along that token's path.
        entropy: Of the distribution that the token came from, in nats. None unless the controller has ``needs_entropy``.
        margin: The token's score minus that of the best other token, in nats. With coupled sampling scores include the noise.
        nodes: Nodes drafted in this round; equals ``depth`` for a chain.
    """

    depth: int
    probability: float
    path_probability: float
    entropy: float | None
    margin: float
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """One committed round.

    Attributes:
        steps: Draft steps that ran; 0 in a round of plain decoding, and in one that verifies what the text proposed.
        draft_seconds: Time until the draft was complete, the controller's own time included.
        depth: Deepest level of the draft that was verified. Less than ``steps`` where a tree budget dropped levels. Tokens of
            the text do not count.
        nodes: Nodes that were verified, the root not counted.
        verify_seconds: Time of the verify pass over these nodes and the root.
        accepted: Draft tokens that were accepted.
        num_expanded: Accepted tokens whose node the draft had expanded. Lower than ``accepted`` when an accepted token was a
            candidate that was never expanded, or the text's.
        copied: Tokens of the text that were verified before the first drafted one.
        first_right: Whether the first drafted token was right, also where it was not verified; None: nothing was drafted.
    """

    steps: int
    draft_seconds: float
    depth: int
    nodes: int
    verify_seconds: float
    accepted: int
    num_expanded: int
    copied: int = 0
    first_right: bool | None = None


class Stateful:
    """An object that learns, and can save what it learned as JSON values.

    ``learned`` names the attributes to save: numbers, lists of numbers, random generators, and other ``Stateful`` objects.
    """

    learned: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        """Everything learned, and the random state."""
        return {name: _saved(getattr(self, name)) for name in self.learned}

    def restore(self, state: Any) -> None:
        """Continue from a :meth:`state`. Raises ValueError for anything else; the object is then of no use."""
        if not isinstance(state, Mapping) or set(state) != set(self.learned):
            raise ValueError(f"it must have the entries {', '.join(self.learned)}")
        for name in self.learned:
            setattr(self, name, _restored(getattr(self, name), state[name], name))
        self.check_learned()

    def check_learned(self) -> None:
        """Check what was restored. Raises ValueError for values that no learning leads to."""


def _saved(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return list(value) if isinstance(value, list) else value


def _restored(current: Any, value: Any, name: str) -> Any:
    """``value`` as the type of ``current``."""
    if isinstance(current, Stateful):
        current.restore(value)
        return current
    if isinstance(current, np.random.Generator):
        try:
            current.bit_generator.state = value
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{name} is no random state ({error})") from None
        return current
    if isinstance(current, list):
        if not isinstance(value, list) or len(value) != len(current):
            raise ValueError(f"{name} must be a list of {len(current)} numbers")
        return [number(item, name) for item in value]
    return type(current)(number(value, name))


LARGEST = 1e9
"""Larger than anything that is learned: seconds, rounds, tokens."""


def number(value: Any, name: str) -> float:
    """A JSON number of at most :data:`LARGEST`; ValueError for anything else."""
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} must be a number")
    return float(value)


class Controller(Stateful):
    """Decides after each draft step whether to run another. Subclasses override what they need.

    For each round that may draft a session calls :meth:`begin_round` once and :meth:`keep_drafting` after each step; for each
    round that is committed, :meth:`observe`. A round that is cancelled is never observed.

    Attributes:
        value: What rounds cost and are worth, if it asks. Other rules may share it, so a session teaches it by itself.
    """

    needs_entropy: ClassVar[bool] = False
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Another request begins: what was learned about the previous text may not hold for it."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round whose tree has ``width`` nodes a level (1: a chain).

        Returns:
            The number of draft steps, if it is known already, so that no step has to wait for an answer; 0 for a round
            without drafts. None: ask :meth:`keep_drafting` after each step.
        """
        return None

    def begin_after_text(self, width: int, copied: Sequence[float]) -> bool:
        """Begin a round that verifies tokens of the text: whether to draft after them, step by step.

        Args:
            width: Nodes of a level.
            copied: For each of these tokens, the chance that it and all before it are right.
        """
        return False

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        raise NotImplementedError

    def expected_tokens(self, outcome: RoundOutcome) -> float:
        """Tokens that a round like this one brings on average, told before :meth:`observe`; what it brought, if not known."""
        return outcome.accepted + 1

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round. One without draft steps, which may not have been asked for, tells only its cost."""
