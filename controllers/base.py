"""The interface of controllers, and the draft steps and outcomes of rounds that controllers
receive."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from eesd.controllers.value import RoundValue


EXIT = "exit"
TEXT = "text"
"""The names of the drafters. ``EXIT`` is the draft engine (an exit head or a quantized model), and
``TEXT`` is the text itself."""


class DraftStep(NamedTuple):
    """A draft step that has just run, as the controller sees it.

    Attributes:
        depth: Number of levels that were drafted in this round. It is 1 after the first step.
        probability: The draft's probability of the token that was just drafted. In a tree, this
            token is the best node of the new level.
        path_probability: Product of the probabilities along that token's path.
        margin: The token's score minus the score of the best other token, in nats. With coupled
            sampling, scores include the noise.
        nodes: Number of nodes that were drafted in this round. For a chain it equals ``depth``.
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
        chosen: Index of the candidate that equals the verifier's token, or None if no candidate
            equals it.
    """

    score: float
    chosen: int | None


class RoundOutcome(NamedTuple):
    """The outcome of a committed round. Its observers are the controllers, the tree budget, the
    text rule and the guard.

    Attributes:
        steps: Number of draft steps that ran. It is 0 in a round of plain decoding, and in a round
            that verifies only tokens that the text proposed.
        draft_seconds: Time until the draft was complete, including the controller's time.
        depth: Deepest level of the draft that was verified, not counting the text's tokens. It is
            less than ``steps`` if a tree budget dropped levels.
        nodes: Number of verified nodes, not counting the root.
        verify_seconds: Duration of the verify pass over the root and these nodes.
        accepted: Number of draft tokens that the verifier accepted. They include tokens after the
            end of the text, although these are not committed.
        num_expanded: Number of accepted tokens whose node the draft had expanded. It is lower than
            ``accepted`` if an accepted token came from the text, or was a candidate that was never
            expanded.
        first_right: Whether the first drafted token was right, even if it was not verified. It is
            None if nothing was drafted.
        expected: Number of tokens that the round was expected to commit. If there was no estimate,
            it is the actual number.
        seconds: Duration of the whole round.
        labels: If a tree budget is used, there is a label for each accepted node that has
            candidates.
        proposed: Number of tokens of the text's proposal for which the committed tokens show
            whether they are right. The first wrong token is the last one that counts. Some of these
            tokens may not have been verified.
        right: Number of these tokens that are right.
        drafter: Name of the drafter that the round used. It is empty in a round of plain decoding.
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
        value: The costs and the worth of rounds, if the controller needs them. It is a separate
            observer, because other rules may share it. It is set when the controller is made.
        steps_at_once: Number of steps of a chain that a device may run before it waits for the
            controller's answer. If it is 0, the device runs one step.
    """

    steps_at_once: ClassVar[int] = 0
    value: "RoundValue | None" = None

    def begin_request(self) -> None:
        """Begin another request. This resets the state that is specific to the previous text."""

    def begin_round(self, width: int) -> int | None:
        """Begin a round. Its tree has ``width`` nodes per level. If ``width`` is 1, the tree is a
        chain.

        Returns:
            The number of draft steps if it is fixed, so that no step has to wait for an answer. It
            is 0 for a round without drafts, and None if :meth:`keep_drafting` decides after each
            step.
        """
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        """Return whether to draft one more token. In a tree, this is one more level."""
        raise NotImplementedError

    def expected_tokens(self, depth: int) -> float | None:
        """Return the expected number of tokens of this round if ``depth`` levels of its draft are
        verified, or None if it is unknown."""
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round. A round without draft steps is only a sample of costs,
        because the guard or the text rule may have prevented the draft."""


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
