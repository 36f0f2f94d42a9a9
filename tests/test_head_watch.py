"""An exit head that knows far less than its calibration says is told of once, and never by chance."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import eesd
from eesd.common.manifest_reader import load_manifest
from eesd.common.prior import CalibrationPrior
from eesd.controllers import DraftStep
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.head_watch import LEAST, HeadWatch
from eesd.runtime.llm import LLM, Speculation


def watched(share: float, drafts: int, caplog: pytest.LogCaptureFixture) -> HeadWatch:
    """A watch of drafts of which a share of the expected ones are right."""
    random, prior = np.random.default_rng(0), CalibrationPrior()
    watch, calibrated = HeadWatch(prior), Calibrator(prior.accept, prior)
    caplog.clear()
    for _ in range(drafts):
        probability = float(random.uniform(0.1, 0.99))
        step = DraftStep(1, probability, probability, None, float(random.exponential(2)), 1)
        watch.observe(step, random.random() < share * sigmoid(calibrated.score(features(step))))
    return watch


@pytest.mark.fast
def test_a_head_is_told_of_once_when_it_collapses(caplog: pytest.LogCaptureFixture) -> None:
    assert not watched(1.0, 3 * LEAST, caplog).collapsed and not caplog.records
    assert not watched(0.7, 3 * LEAST, caplog).collapsed and not caplog.records
    assert not watched(0.1, LEAST - 1, caplog).collapsed and not caplog.records
    watch = watched(0.3, 3 * LEAST, caplog)
    assert watch.collapsed and len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    message = caplog.records[0].getMessage()
    assert f"expects {watch.expected / watch.judged:.1f}"[:-1] in message and "eesd-distill --init-head" in message


@pytest.mark.parametrize("controller", ["cost-aware-ts", "fixed:k=3"])
def test_all_drafts_of_a_model_are_watched(engine: Path, controller: str) -> None:
    """Of requests alone; without a calibration nothing is expected of a head."""
    manifest = load_manifest(engine)
    engines = eesd.load(engine, speculation=Speculation(controller)).engines
    counts = []
    for calibration in (CalibrationPrior(), None):
        exit_head = replace(manifest.exit_head, calibration=calibration)
        llm = LLM(engine, replace(manifest, exit_head=exit_head), engines, Speculation(controller, guard=False, drafter="exit"))
        stats = llm.generate("abc", max_new_tokens=60, ignore_eos=True).stats
        watch = llm.head_watch
        counts.append(None if watch is None else (watch.judged, 0 < watch.expected < watch.judged, watch.right))
        if watch is not None:
            assert 3 < stats.drafting_rounds - 2 <= watch.judged <= stats.drafting_rounds
            assert watch.right >= stats.accepted_at_depth[0]
    assert counts[1] is None
