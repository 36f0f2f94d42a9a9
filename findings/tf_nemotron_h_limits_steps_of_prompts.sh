#!/usr/bin/env bash
# transformers 5.23.0 (with torch 2.13.0): Nemotron-H limits the steps of a prompt, and not those of
# generated tokens.
#
# Behaviour: the state spaces (Mamba-2) of `nemotron_h` raise a token's step to at least
# `time_step_min` (0.001) if they compute several tokens at once. If a token is computed with the
# cache, its step is not raised. So the logits of a text depend on the part of the text that was
# the prompt. Other classes with `time_step_limit`, such as GraniteMoeHybrid and FalconH1, do the same, but
# their limit is 0 to infinity by default.
#
# Output seen for a text of 12 tokens with random weights, whole, and as 4 tokens followed by 8 single
# tokens (the largest difference of a logit):
#   steps of softplus(0): equal up to rounding (3.1e-06)
#   steps of softplus(-12): 4.85
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
"$place/venv/bin/python" - <<'PYTHON'
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
config = NemotronHConfig(
    vocab_size=50,
    hidden_size=32,
    layers_block_type=["linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    ssm_state_size=8,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=1,
    pad_token_id=None,
)
model = NemotronHForCausalLM(config).eval()
for weight in model.parameters():
    weight.normal_(0, 0.7)
mixer = model.model.layers[0].mixer
mixer.in_proj.weight[-4:] = 0  # a step is softplus of its bias
mixer.D.zero_()
ids = torch.randint(0, 50, (1, 12))
found = []
for bias in (0.0, -12.0):
    mixer.dt_bias.fill_(bias)
    whole = model(ids, use_cache=False).logits[0, -1]
    cache = model(ids[:, :4], use_cache=True).past_key_values
    for at in range(4, 12):
        one = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1]
    found.append(float((whole - one).abs().max()))
    print(f"steps of softplus({bias:.0f}): {found[-1]:.3g}")
assert found[0] < 1e-3 and found[1] > 1, "the behaviour changed"
PYTHON
