"""Run a prompt with and without drafting. The comparison shows the speed-up, and whether the tokens
and logits are the same."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.base import Logits
from eesd.runtime.llm import LLM, Completion, Prompt

KEPT_BYTES = 1 << 28
"""Maximum number of bytes of the logits of a generation that are kept whole, so that differences
can be measured. Of further logits, only hashes are kept."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between two generations.

    Attributes:
        index: Index of the token among the new tokens.
        plain_token, drafting_token: The token at this index without and with drafting. It is -1 for
            a generation that ended before this index.
        logit_gap: The verifier's logit of ``plain_token`` minus its logit of ``drafting_token``. It
            is near zero if the logits are equal up to rounding.
    """

    index: int
    plain_token: int
    drafting_token: int
    logit_gap: float


@dataclass(frozen=True)
class LogitComparison:
    """A bit-for-bit comparison of two generations. It compares the logits from which each new token
    was chosen, up to the first token that differs.

    Attributes:
        positions: Number of new tokens whose logits were compared.
        differing: Number of positions at which a bit differs.
        first: Index of the first such position, or -1 if there is none.
        largest: The largest difference between two logits. Only logits that were kept whole are
            considered.
    """

    positions: int = 0
    differing: int = 0
    first: int = -1
    largest: float = 0.0

    def __add__(self, other: "LogitComparison") -> "LogitComparison":
        """Return the comparison of this generation and another one as if the second generation
        continued the first."""
        first = (
            self.first if self.differing or not other.differing else self.positions + other.first
        )
        differing = self.differing + other.differing
        largest = max(self.largest, other.largest)
        return LogitComparison(self.positions + other.positions, differing, first, largest)

    def __str__(self) -> str:
        if not self.differing:
            return f"logits are equal, bit for bit ({self.positions} positions)"
        return (
            f"logits differ at {self.differing} of {self.positions} positions, first at new "
            f"token {self.first}, by at most "
            f"{self.largest:.1e}"
        )


class LogitRecord:
    """A record of the logits from which each new token of a generation was chosen. It is an
    observer of the session."""

    def __init__(self, reference: "LogitRecord | None" = None, whole: bool = True) -> None:
        """Record logits, or compare them with those of a ``reference``.

        Args:
            reference: The record to compare with.
            whole: Whether to keep whole logits. If False, only hashes are kept. They show where
                bits differ, but not by how much.
        """
        self.tokens: list[int] = []
        self.result = LogitComparison()
        self._rows: list[Logits | bytes] = []
        self._kept = 0
        self._reference = reference
        self._whole = whole

    def __call__(self, tokens: Sequence[int], logits: Logits) -> None:
        for token, row in zip(tokens, logits, strict=True):
            if self._reference is None:
                self._keep(row)
            else:
                self._compare(self._reference, row)
            self.tokens.append(token)

    def _keep(self, row: Logits) -> None:
        whole = self._whole and self._kept + row.nbytes <= KEPT_BYTES
        if whole:
            self._kept += row.nbytes
        self._rows.append(row.copy() if whole else _hash(row))

    def _compare(self, reference: "LogitRecord", row: Logits) -> None:
        index = len(self.tokens)
        before = self.result
        if index >= len(reference._rows) or self.tokens != reference.tokens[:index]:
            return
        kept = reference._rows[index]
        bits = kept if isinstance(kept, bytes) else _hash(kept)
        equal = _hash(row) == bits
        largest = before.largest
        if not equal and not isinstance(kept, bytes):
            largest = max(largest, float(np.abs(row - kept).max()))
        first = before.first
        if not equal and first < 0:
            first = index
        self.result = LogitComparison(
            before.positions + 1, before.differing + (not equal), first, largest
        )


def _hash(row: Logits) -> bytes:
    return blake2b(row.tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Comparison:
    """The results of running a prompt without and with drafting.

    Attributes:
        text: The text of plain decoding. It follows the prompt if the prompt is a text.
        plain, drafting: Statistics without and with drafting.
        divergence: The first difference between the tokens, or None if the tokens are the same.
        logits: Comparison of the logits.
        one_node: Statistics of plain decoding without padding. They are None unless plain decoding
            is padded to a round's nodes, which is done so that drafting does not change any bit.
    """

    text: str
    plain: Stats
    drafting: Stats
    divergence: Divergence | None
    logits: LogitComparison
    one_node: Stats | None = None

    @property
    def speedup(self) -> float:
        """Decode speed with drafting divided by decode speed without, both in tokens per second."""
        plain = self.plain.tokens_per_second
        return self.drafting.tokens_per_second / plain if plain else 0.0


def compare(
    llm: LLM,
    prompt: Prompt,
    sampling: Sampling,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
) -> Comparison:
    """Run the prompt once without and once with drafting, after a short warm-up of both. The
    arguments are those of :meth:`LLM.generate`."""
    tokens = llm.encode(prompt)
    sampling = sampling.of_text()

    def run(
        limit: int, draft: bool, record: LogitRecord | None = None, model: LLM = llm
    ) -> Completion:
        observed = copy(model)
        observed.observer = record
        return observed.generate(
            tokens, sampling, max_new_tokens=limit, stop=stop, draft=draft, ignore_eos=ignore_eos
        )

    for draft in (False, True):
        run(min(8, max_new_tokens), draft)

    def recorded(whole: bool) -> tuple[Completion, Completion, LogitComparison]:
        expected = LogitRecord(whole=whole)
        found = LogitRecord(expected)
        return run(max_new_tokens, False, expected), run(max_new_tokens, True, found), found.result

    plain, drafting, logits = recorded(whole=False)
    if logits.differing:  # measuring it needs whole logits, which take much memory
        logits = replace(logits, largest=recorded(whole=True)[2].largest)
    divergence = first_divergence(llm, tokens, plain.tokens, drafting.tokens)
    text = plain.text
    if isinstance(prompt, str):
        text = prompt + text
    alone = _of_one_node(llm)
    one_node = None
    if alone is not None:
        run(min(8, max_new_tokens), False, model=alone)
        one_node = run(max_new_tokens, False, model=alone).stats
    return Comparison(text, plain.stats, drafting.stats, divergence, logits, one_node)


def _of_one_node(llm: LLM) -> LLM | None:
    """Return the same model with plain decoding that is not padded to a round's nodes. Return None
    if plain decoding is not padded anyway."""
    verify = getattr(llm.engines.verify, "of_one_node", lambda: None)()
    if verify is None:
        return None
    alone = copy(llm)
    alone.engines = llm.engines._replace(verify=verify)
    return alone


def first_divergence(
    llm: LLM, prompt: list[int], plain: list[int], drafting: list[int]
) -> Divergence | None:
    """Return the first difference between two generations, or None if their tokens are the same."""
    differing = (i for i, (a, b) in enumerate(zip(plain, drafting, strict=False)) if a != b)
    index = next(differing, None)
    if index is None:
        if len(plain) == len(drafting):
            return None
        return Divergence(min(len(plain), len(drafting)), -1, -1, float("nan"))
    with llm.session(prompt + plain[:index], max_new_tokens=1, draft=False) as session:
        logits = session.peek()
    return Divergence(
        index, plain[index], drafting[index], float(logits[plain[index]] - logits[drafting[index]])
    )
