"""The interface of controllers: draft steps, outcomes of rounds, and their methods."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


EXIT = "exit"
TEXT = "text"
"""Names of drafters: the draft engine (exit head or quantized model), and the text."""


class DraftStep(NamedTuple):
    """One draft step, for the controller, right after it ran.

    Attributes:
        depth: Levels drafted in this round; 1 after the first step.
        probability: The draft's probability of the token just drafted (tree: of the new level's
            best node).
        path_probability: Product of the probabilities along that token's path.
        margin: The token's score minus the best other token's score, in nats. With coupled sampling
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
    """The verifier's choice after one accepted node.

    Attributes:
        score: Calibration score of the first candidate.
        chosen: Index of the candidate that equals the verifier's token; None if there is none.
    """

    score: float
    chosen: int | None


class RoundOutcome(NamedTuple):
    """One committed round, for the observers: controllers, budget, text rule and guard.

    Attributes:
        steps: Draft steps that ran; 0 in a round of plain decoding, and in a round that verifies
            only the text's tokens.
        draft_seconds: Time until the draft was complete, the controller's own time included.
        depth: Deepest level of the draft that was verified. Less than ``steps`` where a tree budget
            dropped levels. Tokens of the text do not count.
        nodes: Nodes that were verified, the root not counted.
        verify_seconds: Time of the verify pass over these nodes and the root.
        accepted: Draft tokens that the verifier accepted, including those after the end of the
            text, which are not committed.
        num_expanded: Accepted tokens whose node the draft had expanded. Lower than ``accepted``
            when an accepted token was a candidate that was never expanded, or the text's.
        first_right: Whether the first drafted token was right, also where it was not
            verified; None: nothing was drafted.
        expected: Expected tokens of such a round; the actual number if there is no estimate.
        seconds: Time of the whole round.
        labels: With a tree budget, one for each accepted node that has candidates.
        proposed: The text's first proposed tokens, verified or not, up to the first wrong one or
            the last committed one.
        right: Number of right tokens among them.
        drafter: Name of the drafter whose round it was; empty in a round of plain decoding.
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
    drafter: str = ""


class Controller:
    """Decides after each draft step whether to run another. Subclasses override what they need.

    For each round that may draft a session calls :meth:`begin_round` once and :meth:`keep_drafting`
    after each step; for each round that is committed, :meth:`observe`. A round that is cancelled is
    never observed.

    Attributes:
        value: Costs and worth of rounds, if the controller needs them. It is a separate observer,
            because other rules may share it. Set at the beginning.
        steps_at_once: Steps of a chain that a device may run before it waits for the controller's
            answer. 0 means one step.
    """

    steps_at_once: ClassVar[int] = 0
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Begin another request: forget what holds for the previous text only."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round whose tree has ``width`` nodes a level (1: a chain).

        Returns:
            The number of draft steps, if it is fixed, so that no step has to wait for an answer; 0
            for a round without drafts. None: :meth:`keep_drafting` decides after each step.
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
        """Learn from a committed round. A round without draft steps is a sample of the costs
        only: the guard or the text may have decided it."""
