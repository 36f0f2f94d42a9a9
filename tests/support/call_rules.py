"""Rules for calls to TensorRT and CUDA that hardware does not enforce. They are checked in the log
of a ``fake_cuda.Machine``."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from support.fake_cuda import Call, Machine

CHANGES = ("profile", "shape", "address", "memory")
"""Calls that change the work of an execution context."""
FORBIDDEN = ("context", "destroy", "load", "allocate", "pin", "synchronize", *CHANGES)
"""Calls that are forbidden during a capture. Some allocate, free or wait, which invalidates the
capture. The others would not be repeated by it."""


def violations(machine: Machine) -> list[str]:
    """Returns sentences that name the rules that are broken in the log."""
    log = machine.log
    found = [f"{call.name} while work is captured" for call in log if _is_forbidden(call)]
    found += [
        f"{call.name} of a context while another device is current"
        for call in log
        if _is_elsewhere(machine, call)
    ]
    found += [
        f"{call.name} with the collector on" for call in log if call.capturing and call.collector
    ]
    return found + _out_of_order(log)


def _is_forbidden(call: Call) -> bool:
    return call.capturing and call.name in FORBIDDEN


def _is_elsewhere(machine: Machine, call: Call) -> bool:
    """Returns whether a context is created or used outside its engine's device, or in a stream of
    another device."""
    if call.of < 0 or call.name == "destroy":
        return False
    if call.stream is not None and machine.streams[call.stream].device_index != call.of:
        return True
    return call.device != call.of


def _out_of_order(log: Sequence[Call]) -> list[str]:
    """Returns a sentence for each context that was captured before it ran, or that changed after
    its capture."""
    found = []
    ran = set()
    captured = set()
    for call in log:
        if call.name == "execute" and call.capturing:
            captured.add(call.subject)
            if call.subject not in ran:
                found.append("execute is captured before the context ran")
        elif call.name == "execute":
            ran.add(call.subject)
        elif call.name in CHANGES and call.subject in captured:
            found.append(f"{call.name} after the context was captured")
    return found


class Figures(NamedTuple):
    """Counts of three kinds of events. The host waits, it launches work of engines as a graph, or
    it launches work as a call."""

    waits: int
    replays: int
    executes: int


def figures(log: Sequence[Call]) -> Figures:
    """Returns the figures of a part of a log, such as one round."""
    counts = Counter(call.name for call in log)
    return Figures(counts["synchronize"], counts["replay"], counts["execute"])
