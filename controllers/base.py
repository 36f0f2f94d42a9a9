"""The interface of controllers: draft steps, outcomes of rounds, and their methods."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


EXIT = "exit"
TEXT = "text"
"""Names of drafters: the draft engine (exit head or quantized model), and the text."""


class DraftStep(NamedTuple):
    """A draft step that has just run, as the controller sees it.

    Attributes:
        depth: Levels drafted in this round; 1 after the first step.
        probability: The draft's probability of the token just drafted (tree: of the new level's
            best node).
        path_probability: Product of the probabilities along that token's path.
        margin: The token's score minus the best other token's score, in nats. With coupled
            sampling, scores include the noise.
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
        length: Length of the match that the token followed, in tokens.
        times: Number of times that the token followed that match.
        of: Number of times that any token followed that match.
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
        steps: Number of draft steps that ran; 0 in a round of plain decoding, and in a round that
            verifies only the text's tokens.
        draft_seconds: Time until the draft was complete, including the controller's time.
        depth: Deepest level of the draft that was verified, not counting the text's tokens. Less
            than ``steps`` if a tree budget dropped levels.
        nodes: Number of verified nodes, not counting the root.
        verify_seconds: Duration of the verify pass over the root and these nodes.
        accepted: Number of draft tokens that the verifier accepted, including tokens after the end
            of the text, which are not committed.
        num_expanded: Accepted tokens whose node the draft had expanded. Lower than ``accepted``
            if an accepted token was a candidate that was never expanded, or came from the text.
        first_right: Whether the first drafted token was right, even if it was not verified; None if
            nothing was drafted.
        expected: Number of tokens that the round was expected to commit; the actual number if there
            was no estimate.
        seconds: Duration of the whole round.
        labels: With a tree budget, a label for each accepted node that has candidates.
        proposed: Number of tokens of the text's proposal that the committed tokens judge, up to and
            including the first wrong token. Some may not have been verified.
        right: Number of these tokens that are right.
        drafter: Name of the drafter that the round used; empty in a round of plain decoding.
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

    In each round that may draft, a session calls :meth:`begin_round` once and :meth:`keep_drafting`
    after each step. It calls :meth:`observe` after each committed round, and never for a cancelled
    round.

    Attributes:
        value: Costs and worth of rounds, if the controller needs them. It is a separate observer,
            because other rules may share it. Set when the controller is made.
        steps_at_once: Steps of a chain that a device may run before it waits for the controller's
            answer. 0 means one step.
    """

    steps_at_once: ClassVar[int] = 0
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Begin another request: reset the state that is specific to the previous text."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round whose tree has ``width`` nodes a level (1: a chain).

        Returns:
            The number of draft steps if it is fixed, so that no step has to wait for an answer; 0
            for a round without drafts; None if :meth:`keep_drafting` decides after each step.
        """
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        """Whether to draft one more token (tree: one more level)."""
        raise NotImplementedError

    def expected_tokens(self, depth: int) -> float | None:
        """Expected tokens of this round if ``depth`` levels of its draft are verified; None if
        unknown."""
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round. A round without draft steps is only a sample of costs: the
        guard or the text rule may have prevented the draft."""


class Fixed(Controller):
    """Always draft ``k`` tokens."""

    def __init__(self, k: int = 4, seed: int = 0) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        self.k = k

    def begin_round(self, width: int) -> int:
        return self.k

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.k
