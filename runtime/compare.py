"""The same prompt with and without drafting: how much faster, and whether the tokens are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.llm import LLM, Completion, Prompt


@dataclass(frozen=True)
class Divergence:
    """Where two generations first differ: index among the new tokens, both tokens, and how far apart the verifier's logits
    for them are there (near zero: the same up to rounding)."""

    index: int
    plain_token: int
    drafted_token: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    """Both runs of one prompt."""

    text: str
    plain: Stats
    drafting: Stats
    divergence: Divergence | None

    @property
    def speedup(self) -> float:
        plain = self.plain.tokens_per_second
        return self.drafting.tokens_per_second / plain if plain else 0.0


def compare(
    llm: LLM, prompt: Prompt, sampling: Sampling, max_new_tokens: int, stop: Sequence[str] = (), ignore_eos: bool = False
) -> Comparison:
    """Run once each way in turn, after a short warm-up of both."""
    tokens = llm.encode(prompt)

    def run(limit: int, draft: bool) -> Completion:
        return llm.generate(tokens, sampling, max_new_tokens=limit, stop=stop, draft=draft, ignore_eos=ignore_eos)

    for draft in (False, True):
        run(min(8, max_new_tokens), draft)
    plain, drafting = run(max_new_tokens, False), run(max_new_tokens, True)
    divergence = first_divergence(llm, tokens, plain.tokens, drafting.tokens)
    text = plain.text if not isinstance(prompt, str) else prompt + plain.text
    return Comparison(text, plain.stats, drafting.stats, divergence)


def first_divergence(llm: LLM, prompt: list[int], plain: list[int], drafted: list[int]) -> Divergence | None:
    """Compare two generations token by token; None when they are the same."""
    differing = (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    index = next(differing, None)
    if index is None:
        if len(plain) == len(drafted):
            return None
        return Divergence(min(len(plain), len(drafted)), -1, -1, float("nan"))
    with llm.session(prompt + plain[:index], max_new_tokens=1, draft=False) as session:
        logits = session.peek()
    return Divergence(index, plain[index], drafted[index], float(logits[plain[index]] - logits[drafted[index]]))
