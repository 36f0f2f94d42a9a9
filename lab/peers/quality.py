"""The distance of next-token distributions from float32. It is measured by the KL divergence and by
the agreement of the most likely token."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from lab.peers.contestants import EESD, F32, Contestant
from lab.peers.process import PeerError, Process
from lab.peers.results import Quality

Logits = NDArray[np.float32]
Start = Callable[[Contestant], Any]
"""A context manager that gives the loaded :class:`Process` of a contestant."""


def compare(reference: Logits, other: Logits) -> tuple[float, int]:
    """Return the sum of KL(reference || other) over the rows, and the number of rows that have the
    same most likely token.

    Args:
        reference, other: Logits [n, V].

    Raises:
        PeerError: The shapes differ, or ``other`` has values that are not finite.
    """
    if reference.shape != other.shape or not np.isfinite(other).all():
        raise PeerError(
            f"logits: shape {other.shape} with finite values is needed as {reference.shape}."
        )
    p = _log_softmax(reference)
    q = _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(dtype=np.float64)), int(
        (reference.argmax(1) == other.argmax(1)).sum()
    )


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(1, keepdims=True)
    sums: Logits = np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(sums), np.float32)


def reference_of(contestants: list[Contestant]) -> Contestant:
    """Return the contestant that is EESD with float32 logits. Raises :class:`EESDError` if it is
    not among the contestants."""
    found = next((c for c in contestants if c.peer == EESD and c.variant == F32), None)
    if found is None:
        raise EESDError("The quality needs a float32 reference; convert EESD F32.")
    return found


def _judged(
    name: str, process: Process, windows: list[list[int]], expected: list[Path], file: Path
) -> Quality:
    """Compare one contestant with the reference, whose logits of each window are in the files
    ``expected``. ``file`` receives the contestant's logits."""
    divergence = 0.0
    same = 0
    for window, reference in zip(windows, expected, strict=True):
        _write_logits(process, window, file)
        window_divergence, window_same = compare(np.load(reference), np.load(file))
        divergence = divergence + window_divergence
        same = same + window_same
    positions = sum(map(len, windows))
    # Rounding can make the divergence of equal distributions negative.
    return Quality(name, positions, max(0.0, divergence / positions), same / positions)


def _write_logits(process: Process, window: list[int], file: Path) -> None:
    if not process.ask("logits", tokens=window, output=str(file))["given"]:
        raise PeerError("gives no logits of a text")


def measure_quality(
    contestants: list[Contestant],
    reference: Contestant,
    windows: list[list[int]],
    start: Start,
    done: set[str],
    report: Callable[[str, Quality | str], None],
) -> None:
    """Judge every plain contestant. Each runs in a separate process.

    Args:
        contestants: Runtimes to judge. Speculative modes have the distributions of plain decoding.
        reference: The contestant with float32 logits.
        windows: Held-out text.
        start: Starts a contestant.
        done: Names of contestants already judged.
        report: A function that is called with each name, and with its quality or the error.
    """
    waiting = [c for c in contestants if c.is_plain and c.name not in done]
    if not waiting:
        return
    with TemporaryDirectory(prefix="eesd-peers-") as scratch:
        files = [Path(scratch, f"reference-{index}.npy") for index in range(len(windows))]
        try:
            with start(reference) as process:
                for window, file in zip(windows, files, strict=True):
                    _write_logits(process, window, file)
        except PeerError as error:
            raise EESDError(
                f"{reference.name} cannot be the reference of the quality: {error}"
            ) from None
        for contestant in waiting:
            try:
                with start(contestant) as process:
                    report(
                        contestant.name,
                        _judged(
                            contestant.name, process, windows, files, Path(scratch, "other.npy")
                        ),
                    )
            except PeerError as error:
                report(contestant.name, str(error))
