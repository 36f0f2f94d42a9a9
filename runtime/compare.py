"""The same prompt with and without drafting: the speed-up, and whether the tokens are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.llm import LLM, Completion, Prompt


@dataclass(frozen=True)
class Divergence:
    """Where two generations first differ.

    Attributes:
        index: Among the new tokens.
        plain_token, drafting_token: The token there without and with drafting; -1 where one generation is longer.
        logit_gap: The verifier's logit of the first minus that of the second. Near zero: the same up to rounding.
    """

    index: int
    plain_token: int
    drafting_token: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    """Both runs of one prompt. ``divergence`` is None where the tokens are the same."""

    text: str
    plain: Stats
    drafting: Stats
    divergence: Divergence | None

    @property
    def speedup(self) -> float:
        """Decode tokens per second with drafting over those without."""
        plain = self.plain.tokens_per_second
        return self.drafting.tokens_per_second / plain if plain else 0.0


def compare(
    llm: LLM, prompt: Prompt, sampling: Sampling, max_new_tokens: int, stop: Sequence[str] = (), ignore_eos: bool = False
) -> Comparison:
    """Run the prompt once each way, after a short warm-up of both. The arguments are those of :meth:`LLM.generate`."""
    tokens = llm.encode(prompt)

    def run(limit: int, draft: bool) -> Completion:
        return llm.generate(tokens, sampling, max_new_tokens=limit, stop=stop, draft=draft, ignore_eos=ignore_eos)

    for draft in (False, True):
        run(min(8, max_new_tokens), draft)
    plain, drafting = run(max_new_tokens, False), run(max_new_tokens, True)
    divergence = first_divergence(llm, tokens, plain.tokens, drafting.tokens)
    text = plain.text if not isinstance(prompt, str) else prompt + plain.text
    return Comparison(text, plain.stats, drafting.stats, divergence)


def first_divergence(llm: LLM, prompt: list[int], plain: list[int], drafting: list[int]) -> Divergence | None:
    """Compare two generations token by token. None if they are the same."""
    differing = (i for i, (a, b) in enumerate(zip(plain, drafting, strict=False)) if a != b)
    index = next(differing, None)
    if index is None:
        if len(plain) == len(drafting):
            return None
        return Divergence(min(len(plain), len(drafting)), -1, -1, float("nan"))
    with llm.session(prompt + plain[:index], max_new_tokens=1, draft=False) as session:
        logits = session.peek()
    return Divergence(index, plain[index], drafting[index], float(logits[plain[index]] - logits[drafting[index]]))
