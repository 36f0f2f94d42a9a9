#!/usr/bin/env bash
# transformers 5.23.0 (with torch 2.13.0): Phi-3.5-MoE does not use `long_factor` of longrope.
#
# Behaviour: for texts longer than `original_max_position_embeddings`, Phi-3 divides its rotary
# frequencies by `long_factor` instead of `short_factor`. Phi-3.5-MoE (`phimoe`) has the same fields, but
# computes its frequencies without the length of the text, and so with `short_factor`. In long texts only
# the factor of cos and sin changes, to `long_mscale`.
#
# Output seen, with 16 original positions, a long factor of 8 and a long_mscale of 1.5:
#   phimoe, 16 tokens: angle of position 1 is 1.000, factor 1.0
#   phimoe, 64 tokens: angle of position 1 is 1.000, factor 1.5
#   phi3, 16 tokens: angle of position 1 is 1.000
#   phi3, 64 tokens: angle of position 1 is 0.125
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
"$place/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Phi3Config, PhimoeConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

sizes = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
rope = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 16,
}
mscales = {"short_mscale": 1.0, "long_mscale": 1.5}
phimoe = PhimoeRotaryEmbedding(PhimoeConfig(**sizes, rope_parameters={**rope, **mscales}))
phi3 = Phi3RotaryEmbedding(
    Phi3Config(**sizes, original_max_position_embeddings=16, rope_parameters=dict(rope))
)


def first_pair(rotary, length):
    """Angle and factor of the first pair of values at position 1, in a text of this length."""
    cos, sin = rotary(torch.zeros(1, 1), torch.arange(length)[None])
    pair = sin[0, 1, 0], cos[0, 1, 0]
    return torch.atan2(*pair).item(), torch.hypot(*pair).item()


found = {}
for length in (16, 64):
    found["phimoe", length] = angle, factor = first_pair(phimoe, length)
    print(f"phimoe, {length} tokens: angle of position 1 is {angle:.3f}, factor {factor:.1f}")
for length in (16, 64):
    found["phi3", length] = angle, _ = first_pair(phi3, length)
    print(f"phi3, {length} tokens: angle of position 1 is {angle:.3f}")


def close(a, b):
    return abs(a - b) < 1e-4


assert close(found["phi3", 64][0], 1 / 8), "phi3 has changed"
assert close(found["phimoe", 64][0], 1.0) and close(found["phimoe", 64][1], 1.5), "phimoe has changed"
PYTHON
