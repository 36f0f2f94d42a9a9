"""States of 8 bits: how far they are off, for sizes that blocks divide and others, and what a cache makes of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.distilling import distill, read_losses

from eesd.distill.packed_states import pack_states, unpack_states


@pytest.mark.parametrize(("hidden", "blocks"), [(64, 2), (96, 3), (48, 1), (33, 1)])
def test_each_number_is_off_by_half_a_level_at_most(hidden: int, blocks: int) -> None:
    states = torch.randn(3, 5, hidden, generator=torch.Generator().manual_seed(hidden)) * 10 ** torch.arange(-4.0, 1.0)[:, None]
    states[0, 0] = 0
    states[1, 2, 7] = 30000.0
    stored = pack_states("x", states)
    assert stored["x"].dtype == torch.int8 and stored["x.scales"].shape == (3, 5, blocks)
    largest = states.view(3, 5, blocks, -1).abs().amax(-1, keepdim=True).expand(-1, -1, -1, hidden // blocks).flatten(-2)
    error = (unpack_states("x", stored).float() - states).abs()
    # Half a level, the scale's rounding to float16, and the result's to bfloat16; small scales are float16's small ones.
    assert (error <= largest * (1 / 254 + 1 / 2048 + 1 / 256) + 127 * 2.0**-25).all()


def test_training_from_states_of_8_bits_is_training_from_states(learner: Path, own_rows: Path, tmp_path: Path) -> None:
    options = ("--steps", 12, "--precision", "bf16", "--deep", "2,3")
    distill(learner, own_rows, tmp_path / "beside", *options)
    distill(learner, own_rows, tmp_path / "cached", *options, "--offline", tmp_path / "cache")
    shard = load_file(tmp_path / "cache/shard-00000.safetensors")
    assert {name: shard[name].dtype for name in shard if name.startswith("hidden.3")} == {
        "hidden.3": torch.int8,
        "hidden.3.scales": torch.float16,
    }
    beside, cached = read_losses(tmp_path / "beside"), read_losses(tmp_path / "cached")
    assert beside != cached
    assert all(cached[step] == pytest.approx(beside[step], rel=0.02) for step in beside)
