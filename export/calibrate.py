"""The calibration prior of a draft that was never trained: the whole model in fewer bits. The export fits it to the model's own
text, which the engines of the directory write, and tries it on text that was held out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.machine import available_memory
from eesd.common.manifest import MANIFEST_FILE, Manifest, load_manifest
from eesd.common.prior import CalibrationPrior
from eesd.common.terminal import progress_bar
from eesd.common.weights import weight_bytes
from eesd.controllers.calibration import features, sigmoid
from eesd.export.forecast import draft_share, worth_of
from eesd.export.memory import slot_bytes
from eesd.export.own_text import ROWS, OwnText, write_texts
from eesd.export.prior import DraftedRound, calibrate, label_rounds
from eesd.runtime.engines.cpu_build import find_build
from eesd.runtime.llm import Speculation, load

DRAFTS = 12
"""Drafts in a round that the prior is fitted to: the controllers draft no further where a draft step costs what these do."""
HELD_OUT_DRAFTS = 4
"""Drafts in a round of held-out text."""
ROUNDS_PER_TEXT = 8
"""A prompt has two texts."""
MOST_PROMPTS = 40
"""Prompts of a model of at most :data:`FULL_SIZE`, which have 640 rounds in all: about a minute on two cores."""
FULL_SIZE = 1_000_000_000
"""Bytes of a model's weights. Larger ones write after fewer prompts, in proportion."""
PART = 4
"""Every fourth prompt is held out."""
LEAST_TEXTS = 4
"""Held-out texts from which on there is an interval of confidence."""
SLOTS_PER_TEXT = 512
"""Room for a prompt and a text, to estimate memory."""


class Quality(NamedTuple):
    """Tokens a round on held-out text: predicted by the prior from what the draft shows, measured, and the measurement's 95 %
    interval, NaN for fewer than :data:`LEAST_TEXTS` texts."""

    predicted: float
    measured: float
    low: float
    high: float


def calibrate_draft(directory: Path, manifest: Manifest, wanted: bool | None) -> list[str]:
    """Fit a prior to a directory's draft, and write it into the manifest.

    The manifest is replaced as a whole, and nothing else of the directory changes. A draft without a prior of its own has the
    default one.

    Args:
        directory: Engine directory, complete.
        manifest: Its manifest.
        wanted: True: any draft without a prior. None: the whole model as its own draft, if this machine packed its weights and
            has the memory. False: none.

    Returns:
        Lines for the user.
    """
    head = manifest.exit_head
    if wanted is False or (wanted is None and not head.is_whole(manifest.geometry)):
        return []
    if not head.can_draft or head.calibration is not None:
        return ["draft not calibrated: " + ("its head has a prior of its own" if head.can_draft else "there is none")]
    if wanted is None and (problem := _problem(directory, manifest)):
        return [f"draft not calibrated: {problem}; --calibrate does it anyway"]
    try:
        texts = _write(directory, manifest)
        fitting = [text for text in texts if not _is_held_out(text.prompt)]
        prior = calibrate([label_rounds(text.rounds) for text in fitting]).prior
        if prior is not None:
            _store(directory, manifest, prior)
    except EESDError as error:
        return [f"draft not calibrated, controllers will begin with the default prior: {error}"]
    return _lines(manifest, fitting, [text for text in texts if _is_held_out(text.prompt)], prior)


def prompts_for(size: int) -> int:
    """Number of prompts for a model of ``size`` bytes. It depends on nothing else: the same model gets the same prior."""
    return PART * max(round(MOST_PROMPTS / PART * min(1.0, FULL_SIZE / size)), 1)


def quality(prior: CalibrationPrior, texts: Sequence[OwnText]) -> Quality:
    """Compare a prior with text. Texts differ more than their rounds, so the interval is that of a mean over texts."""
    rounds = np.array([len(text.rounds) for text in texts])
    tokens = np.array([sum(1 + one.accepted for one in text.rounds) for text in texts])
    measured = tokens.sum() / rounds.sum()
    predicted = np.mean([_expected(prior, one) for text in texts for one in text.rounds])
    deviation = nan
    if len(texts) >= LEAST_TEXTS:
        spread = ((tokens - measured * rounds) ** 2).sum() * len(texts) / (len(texts) - 1)
        deviation = float(spread**0.5 / rounds.sum())
    return Quality(float(predicted), float(measured), float(measured) - 1.96 * deviation, float(measured) + 1.96 * deviation)


def _expected(prior: CalibrationPrior, drafted: DraftedRound) -> float:
    """Tokens that a round brings on average, by the prior alone."""
    tokens = survival = 1.0
    for step in drafted.steps:
        survival *= sigmoid(float(np.dot(prior.accept, features(step))))
        tokens += survival
    return tokens


def _problem(directory: Path, manifest: Manifest) -> str | None:
    """Why this machine had better not run the engines."""
    if find_build(directory, manifest) is None:
        return "it is not built for the CPU"
    slots = ROWS * SLOTS_PER_TEXT * slot_bytes(manifest, manifest.num_caches)
    needed = sum(weight_bytes(manifest, graph) for graph in manifest.graphs) + slots
    if needed > available_memory():
        return f"that needs about {needed / 1e9:.0f} GB of memory"
    return None


def _write(directory: Path, manifest: Manifest) -> list[OwnText]:
    """Text of the model's own."""
    size = sum(weight_bytes(manifest, graph) for graph in manifest.verify)
    # No controller is asked about a draft that fills the tree.
    held_out, drafts = (min(count, max(manifest.max_tree_nodes - 1, 1)) for count in (HELD_OUT_DRAFTS, DRAFTS))
    lengths = [held_out if _is_held_out(number) else drafts for number in range(prompts_for(size))]
    llm = load(directory, speculation=Speculation(drafter="exit"), generation_config="none")
    with progress_bar("calibrating the draft", len(lengths)) as advance:
        return write_texts(llm, lengths, ROUNDS_PER_TEXT, advance)


def _is_held_out(prompt: int) -> bool:
    return prompt % PART == PART - 1


def _store(directory: Path, manifest: Manifest, prior: CalibrationPrior) -> None:
    """Replace the manifest by one with the prior. Raises EESDError if the directory is another one by now."""
    if load_manifest(directory) != manifest:
        raise EESDError(f"{directory} was written again meanwhile")
    with written_whole(directory / MANIFEST_FILE) as temporary:
        temporary.write_text(replace(manifest, exit_head=replace(manifest.exit_head, calibration=prior)).to_json())


def _lines(
    manifest: Manifest, fitting: Sequence[OwnText], held_out: Sequence[OwnText], prior: CalibrationPrior | None
) -> list[str]:
    """What was found, in words."""
    by_depth = acceptance([one for text in fitting for one in text.rounds])
    if not by_depth:
        return ["draft not calibrated: no round of the model's own text had a whole chain"]
    _, worth = worth_of(by_depth, draft_share(manifest))
    lines = [
        f"draft: on the model's own text {100 * by_depth[0]:.0f} % of its first tokens are right, and at depth {len(by_depth)} "
        f"{100 * by_depth[-1]:.0f} % after right ones: up to {worth:.2f} times as fast where a pass costs what it reads"
    ]
    if prior is None:
        lines.append("draft: a prior of its own predicts no better than the default one, so it has that")
    for greedy, words in ((True, "greedily"), (False, "at temperature 1")):
        texts = [text for text in held_out if text.greedy == greedy and text.rounds]
        if texts:
            found = quality(prior or CalibrationPrior(), texts)
            interval = "" if np.isnan(found.low) else f" (95 %: {found.low:.2f} to {found.high:.2f})"
            lines.append(
                f"draft: {found.predicted:.2f} tokens a round of {len(texts[0].rounds[0].steps)} drafts predicted, "
                f"{found.measured:.2f} measured on held-out text {words}{interval}"
            )
    return lines


def acceptance(rounds: Sequence[DraftedRound]) -> list[float]:
    """Chance of a draft by depth, if those before it were right; empty without rounds."""
    accepted = np.array([one.accepted for one in rounds])
    reached = [int((accepted >= depth).sum()) for depth in range(len(rounds[0].steps) + 1 if rounds else 0)]
    return [right / judged for judged, right in pairwise(reached) if judged]
