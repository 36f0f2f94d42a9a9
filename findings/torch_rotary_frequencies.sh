#!/usr/bin/env bash
# torch 2.13.0, CPU, float32: two of five rotary frequencies are not the nearest float32.
#
# Model code, transformers' among it, computes them as 1.0 / base ** (arange(0, dim, 2) / dim) in
# float32. The exponent, the power and the reciprocal round one after another. A careful engineer
# expects an error of one unit in the last place and ports the formula to another library without
# a thought. The error reaches six units, it is multiplied by the position, and torch's pow alone
# misses the nearest float32 as well. So a runtime that computes the table exactly, or with another
# library's pow, has other bits than transformers in those columns.
#
# Output seen (eight bases of published models, five sizes of heads):
#   2496 frequencies: 998 are not the nearest float32, by 6.0 units at most; pow alone misses 22
# The counts depend a little on the instruction set, so the script compares bounds.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 mpmath==1.3.0
"$place/venv/bin/python" - <<'PYTHON'
import mpmath
import numpy as np
import torch

mpmath.mp.prec = 200
BASES = 1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 8e6, 1e7
SIZES = 64, 80, 96, 128, 256


def nearest(exact):
    return np.float32(float(exact))


count = by_pow = wrong = 0
worst = 0.0
for base in BASES:
    for size in SIZES:
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        powers = base**exponents
        frequencies = 1.0 / powers
        for i in range(size // 2):
            power = mpmath.mpf(base) ** mpmath.mpf(float(exponents[i]))
            by_pow += float(powers[i]) != nearest(power)
            right = nearest(mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / size))
            wrong += float(frequencies[i]) != right
            worst = max(worst, abs(float(frequencies[i]) - right) / np.spacing(right))
            count += 1
print(
    f"{count} frequencies: {wrong} are not the nearest float32, by {worst:.1f} units at most; "
    f"pow alone misses {by_pow}"
)
assert count == 2496 and wrong > 500 and worst > 2 and by_pow > 0, "the behaviour changed"
PYTHON
