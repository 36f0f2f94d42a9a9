"""The host's memory for keys and values: what is used stays when S changes, in the same memory or in another."""

import numpy as np
import pytest
from support.harness import Harness

import eesd.runtime.engines.host_memory as host_memory
from eesd.runtime.engines.host_memory import HostMemory

ROWS = 3


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["memory given back", "memory kept"])
def test_what_is_used_stays_when_the_slots_change(harness: Harness, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(host_memory, "SMALL", small)
    random = np.random.default_rng(0)
    memory = HostMemory(harness.manifest, ROWS, 8)
    memory.data[:] = random.random(memory.data.shape, np.float32)
    for _ in range(40):
        rows, slots = int(random.integers(ROWS + 1)), int(random.integers(1, 200))
        used = int(random.integers(min(slots, memory.slots) + 1))
        expected = memory.data[:, :, :rows, :, :used].copy()
        memory.resize(slots, rows, used)
        assert memory.data.shape[2:5:2] == (ROWS, slots) and np.isfinite(memory.data).all()
        assert (memory.data[:, :, :rows, :, :used] == expected).all()
        memory.data[:] = random.random(memory.data.shape, np.float32)


def test_memory_of_a_long_text_is_given_back(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALL", 0)
    memory = HostMemory(harness.manifest, ROWS, 1024)
    memory.resize(256, ROWS, 0)
    kept = memory.data.base
    memory.resize(255, ROWS, 0)
    given_back = memory.data.base
    assert kept is not None and given_back is not None and kept.nbytes == 4 * memory.data.nbytes // 255 * 256
    assert given_back.nbytes == memory.data.nbytes
