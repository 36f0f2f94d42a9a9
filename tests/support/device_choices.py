"""Choosing tokens on a device: the options and logits of its tests."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.sampling import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMITTED = [3, 1, 4, 1, 5, 6, 2]
OPTIONS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 5.0, 99.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 2**63 - 1]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-12]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    seed=st.sampled_from([0, 7, 2**63 - 1]),
)


def no_logits() -> NDArray[np.float32]:
    raise AssertionError("the host asked for logits")


def random_logits(seed: int, rows: int, size: int, narrow: bool) -> NDArray[np.float32]:
    """With ``narrow`` they are rounded to bfloat16, as logits of 16-bit engines are, so many are equal."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32))
    found: NDArray[np.float32] = (logits.bfloat16().float() if narrow else logits).numpy()
    return found


def on_device(sampler: Any, nodes: list[Node], logits: NDArray[np.float32], count: int) -> NDArray[np.float64]:
    """What the sampler's work for a device makes of the logits."""
    choose = sampler.chooser(nodes, count)
    with torch.inference_mode():
        chosen: NDArray[np.float64] = choose(torch.from_numpy(logits).to(DEVICE)).cpu().numpy()
    return chosen
