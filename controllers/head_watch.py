"""Noticing that an exit head knows much less than it was calibrated to know: the wrong head, or text of another kind."""

import logging

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep
from eesd.controllers.calibration import Calibrator, features, sigmoid

LEAST = 2000
"""Drafts that are judged before anything is said."""
COLLAPSED = 0.5
"""A smaller share of the expected acceptance is told."""

LOGGER = logging.getLogger(__name__)


class HeadWatch:
    """Compares the first tokens of drafts with what the head's calibration expects of them, over all requests.

    The rules that decide about drafting learn what a head is worth, and draft less. So a head that is wrong costs nothing but
    the speed-up, in silence; this breaks the silence once.

    Attributes:
        judged: Drafts whose first token was judged.
        right: Those of them whose first token was right.
        expected: How many the calibration expected to be.
    """

    def __init__(self, prior: CalibrationPrior) -> None:
        self.judged, self.right, self.expected = 0, 0, 0.0
        self._calibrated, self._told = Calibrator(prior.accept, prior), False

    @property
    def collapsed(self) -> bool:
        """Whether enough drafts were judged, and far fewer were right than expected."""
        return self.judged >= LEAST and self.right < COLLAPSED * self.expected

    def observe(self, first: DraftStep, right: bool) -> None:
        """Note a draft's first token and whether it was right. Logs a warning when the head is seen to have collapsed."""
        self.judged += 1
        self.right += right
        self.expected += sigmoid(self._calibrated.score(features(first)))
        if not self._told and self.collapsed:
            self._told = True
            LOGGER.warning(
                "The exit head is right in %.2f of its drafts, and its calibration expects %.2f: it may be another model's, or "
                "know other text. Tokens are right, but drafting brings little; train it on such text (eesd-distill "
                "--init-head), or decode with --drafter text.",
                self.right / self.judged,
                self.expected / self.judged,
            )
