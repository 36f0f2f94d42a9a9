#!/usr/bin/env bash
# torch 2.13.0, CPU, float32: sigmoid, silu and softplus give a value other bits alone than in a long
# tensor.
#
# These functions depend on nothing but the element. A careful engineer expects an element to have the
# same bits wherever it lies, as with torch's exp and tanh. A vector of the processor is computed with
# another formula than the elements that do not fill one, so the bits depend on the place of an element
# and on the length of the tensor. A model that computes a gate with them has other logits for one token
# in a call than for the same token among several.
#
# Output seen (4,096 values of a normal distribution, an AMD EPYC with AVX-512):
#   exp 0, tanh 0, sigmoid 169, silu 181, softplus 604 of 4096 differ
# The counts depend on the instruction set, so the script checks which functions differ at all.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import silu, softplus

torch.manual_seed(0)
values = torch.randn(4096)
functions = {"exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": silu, "softplus": softplus}
differ = {}
for name, function in functions.items():
    alone = torch.cat([function(value) for value in values.split(1)])
    differ[name] = int((function(values) != alone).sum())
print(", ".join(f"{name} {count}" for name, count in differ.items()), f"of {len(values)} differ")
assert not differ["exp"] and not differ["tanh"], "exp or tanh depends on the place, too"
assert differ["sigmoid"] and differ["silu"] and differ["softplus"], "the behaviour changed"
PYTHON
