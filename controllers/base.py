"""What a controller is told, and what it answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


class DraftStep(NamedTuple):
    """One draft step, told right after it ran.

    Attributes:
        depth: Levels drafted in this round; 1 after the first step.
        probability: The draft's probability of the token just drafted (tree: of the new level's
            best node).
        path_probability: Product of the probabilities along that token's path.
        margin: The token's score minus that of the best other token, in nats. With coupled sampling
            scores include the noise.
        nodes: Nodes drafted in this round; equals ``depth`` for a chain.
    """

    depth: int
    probability: float
    path_probability: float
    margin: float
    nodes: int


class TextStep(NamedTuple):
    """A token that the text proposes.

    Attributes:
        length: Tokens of the match that it followed.
        times: How often it followed.
        of: How often the match was followed by anything.
    """

    length: int
    times: int
    of: int


class SiblingLabel(NamedTuple):
    """What the verifier chose behind one accepted node.

    Attributes:
        score: Calibration score of the first candidate.
        chosen: Index of the candidate that equals the verifier's token; None if there is none.
    """

    score: float
    chosen: int | None


class RoundOutcome(NamedTuple):
    """One committed round: all that controllers, budget, text rule and guard learn from it.

    Attributes:
        steps: Draft steps that ran; 0 in a round of plain decoding, and in one that verifies what
            the text proposed.
        draft_seconds: Time until the draft was complete, the controller's own time included.
        depth: Deepest level of the draft that was verified. Less than ``steps`` where a tree budget
            dropped levels. Tokens of the text do not count.
        nodes: Nodes that were verified, the root not counted.
        verify_seconds: Time of the verify pass over these nodes and the root.
        accepted: Draft tokens that the verifier accepted, also behind the end of the text, where
            nothing is committed.
        num_expanded: Accepted tokens whose node the draft had expanded. Lower than ``accepted``
            when an accepted token was a candidate that was never expanded, or the text's.
        first_right: Whether the first drafted token was right, also where it was not
            verified; None: nothing was drafted.
        expected: Tokens that such a round brings on average, as far as is known; else the tokens
            that it brought.
        seconds: Time of the whole round.
        labels: With a tree budget, one for each accepted node that has candidates.
        proposed: The first tokens that the text proposed, verified or not, as far as the committed
            tokens judge them.
        right: How many of them are right; at most one follows that is wrong.
    """

    steps: int
    draft_seconds: float
    depth: int
    nodes: int
    verify_seconds: float
    accepted: int
    num_expanded: int
    first_right: bool | None = None
    expected: float = 1.0
    seconds: float = 0.0
    labels: Sequence[SiblingLabel] = ()
    proposed: Sequence[TextStep] = ()
    right: int = 0


class Controller:
    """Decides after each draft step whether to run another. Subclasses override what they need.

    For each round that may draft a session calls :meth:`begin_round` once and :meth:`keep_drafting`
    after each step; for each round that is committed, :meth:`observe`. A round that is cancelled is
    never observed.

    Attributes:
        value: What rounds cost and are worth, if it asks. Other rules may share it, so a session
            teaches it by itself.
        steps_at_once: Steps of a chain that a device may run before it asks: each answer makes it
            wait for the host. 0: one.
    """

    steps_at_once: ClassVar[int] = 0
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Another request begins: what was learned about the previous text may not hold for it."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round whose tree has ``width`` nodes a level (1: a chain).

        Returns:
            The number of draft steps, if it is known already, so that no step has to wait for an
            answer; 0 for a round without drafts. None: ask :meth:`keep_drafting` after each step.
        """
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        raise NotImplementedError

    def expected_tokens(self, depth: int) -> float | None:
        """Tokens that this round brings on average if ``depth`` levels of its draft are
        verified; None: it is not known."""
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round. One without draft steps, which may not have been asked for,
        tells only its cost."""
