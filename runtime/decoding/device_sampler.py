"""Choose tokens on the logits' device, with the same results as
:mod:`~eesd.runtime.decoding.samplers`.

Only a few numbers for each candidate go to the host. The host's samplers are the definition, and
the tokens are the same:

* The penalty (float32), the shift by the maximum, the temperature and the k-th largest score are
  single IEEE operations, comparisons and moves, so both sides have the same bits.
* The uniform numbers have the same bits: Philox4x64-10 (Salmon et al. 2011), in a kernel that needs
  Triton (:mod:`~eesd.runtime.decoding.device_noise`). Without this kernel the host chooses tokens.
* Logarithms, exponentials and sums differ in the last bits of a float64. The difference is less
  than 1e-12 for a token that can win. So a choice is marked as uncertain if it depends on a number
  that is not finite, or on a difference of :data:`NEAR` or less (between the best two noisy scores,
  or at the edge of a filter). The host makes uncertain choices from the logits.
"""

from collections.abc import Sequence
from functools import cache
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.runtime.decoding.sampling import GumbelNoise, Sampling
from eesd.runtime.engines.base import Choose

NEAR = 1e-9
"""This difference is far larger than rounding errors. Scores are this close about once in a billion
tokens."""


class DeviceSampler:
    """Chooses the tokens of one request on a device, with greedy or coupled sampling."""

    def __init__(self, sampling: Sampling, columns: DraftColumns) -> None:
        """See :func:`~eesd.runtime.decoding.samplers.make_sampler`."""
        self._sampling = sampling
        self._columns = columns
        self._seen: dict[tuple[torch.device, bool], _Seen] = {}
        self._tokens: dict[torch.device, Tensor] = {}

    def chooser(self, tokens: Sequence[int], paths: Sequence[list[int]], count: int) -> Choose:
        """Return the function that chooses tokens from logits on the device.

        Args:
            tokens: All committed tokens.
            paths: The path of drafted tokens before each row of logits.
            count: Number of proposals for each row of the draft's logits. It is 0 for the
                verifier's logits, from which the verifier's token is chosen.

        Returns:
            A function from logits [n, V] float32 to float64. For the draft, its result [n, 3, count
            + 1] has the columns (the best one first), their log-probabilities, and the
            log-probabilities with noise. For the verifier, its result [n, 2] has the token, and 1
            if the host would certainly choose this token. The function returns None if the device
            cannot make the noise.
        """

        def choose(logits: Tensor) -> Tensor | None:
            if not self._sampling.greedy and not makes_noise(logits.device):
                return None
            penalized = self._penalized(logits, tokens, paths, drafts=count > 0)
            if self._sampling.greedy:
                return _likeliest(penalized, count)
            return self._noisiest(penalized, [len(tokens) + len(path) for path in paths], count)

        return choose

    def _penalized(
        self, logits: Tensor, tokens: Sequence[int], paths: Sequence[list[int]], drafts: bool
    ) -> Tensor:
        """Return the logits [n, V] with the repetition penalty for ``tokens`` and for each row's
        path. ``drafts`` is True if they are the draft's logits."""
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits
        place = logits.device, drafts
        if place not in self._seen:
            self._seen[place] = _Seen(
                self._columns if drafts else WHOLE, logits.shape[-1], logits.device
            )
        seen = self._seen[place].mask(tokens, paths)
        factor = _scalar(penalty, logits)
        return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)

    def _noisiest(self, logits: Tensor, positions: Sequence[int], count: int) -> Tensor:
        """Compute the results of the function that :meth:`chooser` returns. The noise for the
        tokens at ``positions`` is added."""
        from eesd.runtime.decoding.device_noise import noisy_best

        device = logits.device
        size = logits.shape[-1]
        if count and device not in self._tokens:
            self._tokens[device] = to_device(self._columns.tokens(range(size)), device)
        scores = logits.double()
        scores -= scores.amax(-1, keepdim=True)
        scores, sure, clear = _filtered(
            scores / _scalar(self._sampling.temperature, scores), self._sampling
        )
        scores = scores.log_softmax(-1) if count else scores
        places = to_device(positions, device)
        tokens = self._tokens[device] if count else None
        best, columns = noisy_best(
            scores, self._sampling.seed or 0, places, tokens, min(max(count, 1) + 1, size)
        )
        if count:
            return torch.stack((columns.double(), scores.gather(-1, columns), best), -2)
        certain = best[:, 0] - best[:, -1] > NEAR
        if sure is not None:
            certain &= sure.gather(-1, columns[:, :1])[:, 0]
        if clear is not None:
            certain &= clear
        return torch.stack((columns[:, 0].double(), certain.double()), -1)


@cache
def makes_noise(device: torch.device) -> bool:
    """Return whether a device makes the same noise as the host. A trial shows this, as in
    :func:`~.torch_quantized.fault_of_kernel`."""
    size = 9
    seed = 2**62 + 3
    positions = [5, 2**33]
    try:
        from eesd.runtime.decoding.device_noise import noisy_best

        scores = torch.zeros((2, size), dtype=torch.float64, device=device)
        values, columns = noisy_best(scores, seed, to_device(positions, device), None, size)
        found = torch.zeros_like(scores).scatter(1, columns, values).cpu().numpy()
    except Exception:
        # A compiler, a driver or a file system can fail in any way. If that happens, the host
        # chooses tokens.
        return False
    return np.allclose(
        found,
        [GumbelNoise(seed, size).at(position) for position in positions],
        rtol=1e-12,
        atol=1e-13,
    )


class _Seen:
    """The tokens that a request has seen, as a mask over the columns of one engine's logits."""

    def __init__(self, columns: DraftColumns, size: int, device: torch.device) -> None:
        self._columns = columns
        self._size = size
        self._committed = torch.zeros(size + 1, dtype=torch.bool, device=device)
        """The last column does not represent a token. It pads short paths."""
        self._marked = 0

    def mask(self, tokens: Sequence[int], paths: Sequence[list[int]]) -> Tensor:
        """Return a mask [n, V] of the committed tokens and the tokens of each row's path."""
        device = self._committed.device
        if self._marked < len(tokens):
            self._committed.index_fill_(
                0, to_device(self._columns.of(tokens[self._marked :]), device), True
            )
            self._marked = len(tokens)
        columns = [[*self._columns.of(path)] if path else [] for path in paths]
        width = max(map(len, columns))
        table = [[*row, *[self._size] * (width - len(row))] for row in columns]
        seen = self._committed.repeat(len(paths), 1)
        if width:
            seen.scatter_(1, to_device(table, device), True)
        return seen[:, : self._size]


def _scalar(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor, for use as a divisor. If a divisor is a plain number, a GPU
    multiplies by its reciprocal, which rounds differently."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def to_device(values: object, device: torch.device, dtype: type = np.int64) -> Tensor:
    """Copy numbers to a device, without waiting for the copy."""
    tensor = torch.from_numpy(np.array(values, dtype))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Compute the results of the function that :meth:`DeviceSampler.chooser` returns, without
    noise."""
    if count:
        logprobs = logits.double().log_softmax(-1)
        # One more candidate, which the last margin needs.
        best, columns = logprobs.topk(min(count + 1, logprobs.shape[-1]))
        return torch.stack((columns.double(), best, best), -2)
    best = logits.argmax(-1, keepdim=True)
    # NaN and infinity count as uncertain, so the host refuses them.
    return torch.cat((best.double(), (logits.gather(-1, best) < torch.inf).double()), -1)


def _filtered(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Apply top-k, top-p and min-p.

    Args:
        scores: Scores [n, V] in float64. The largest score of each row is 0.
        sampling: The options.

    Returns:
        The scores, which are -inf where a filter certainly removes a token. Then a mask [n, V] of
        the tokens that are certainly kept, or None if all remaining tokens are kept. Last a mask
        [n] of the rows for which the first two results are certain, or None if they are certain for
        all rows.
    """
    sure = clear = None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        kept = before < sampling.top_p - NEAR
        left = before < sampling.top_p + NEAR
        kept[:, 0].fill_(True)
        # The host may round two nearly equal scores to the same value, and then take the lower id
        # first.
        apart = ordered[:, :-1] - ordered[:, 1:]
        edge = (kept[:, :-1] ^ kept[:, 1:]) | (left[:, :-1] ^ left[:, 1:])
        clear = ~(edge & (apart > 0) & (apart < NEAR)).any(-1)
        none = torch.zeros_like(kept)
        sure = none.scatter(-1, order, kept)
        scores = scores.masked_fill(~none.scatter(-1, order, left), -inf)
    if sampling.min_p > 0:
        above = scores >= log(sampling.min_p) + NEAR
        sure = above if sure is None else sure & above
        scores = scores.masked_fill(scores < log(sampling.min_p) - NEAR, -inf)
    return scores, sure, clear
