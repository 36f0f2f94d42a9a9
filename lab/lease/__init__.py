"""The steps of ``python -m lab.lease``, which makes the first checks of a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lease:
    """The device and output of a step.

    Attributes:
        device: The Torch device. On the CPU, all shapes are small.
        output: Directory for files.
    """

    device: str
    output: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Step:
    """One measurement.

    Attributes:
        run: Returns JSON values. Its output is shown if it fails.
        seconds: Time limit.
    """

    run: Callable[[Lease], Mapping[str, Any]]
    seconds: float
