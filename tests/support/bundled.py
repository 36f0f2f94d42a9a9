"""The bundled model, and what lossless means for it."""

import json
from pathlib import Path

from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation, load

EXAMPLE = Path(__file__).parents[2] / "examples/pycode"
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_p=0.95, seed=4)]
SPECULATIONS = [
    Speculation(controller, width, guard=False)
    for controller in ("fixed:k=4", "threshold:p=0.5", "cost-aware-ts")
    for width in (1, 3)
]
SPECULATIONS += [Speculation("cost-aware-ts", width, guard=False, tree_budget=True) for width in (1, 2)]


def prompts() -> list[str]:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def tokens(llm: LLM, prompt: str, sampling: Sampling, count: int) -> list[int]:
    return llm.generate(prompt, sampling, max_new_tokens=count, ignore_eos=True).tokens


def assert_lossless(directory: Path, texts: list[str], sampling: Sampling, count: int) -> None:
    plain = load(directory, speculation=None)
    drafting = {speculation: load(directory, speculation=speculation) for speculation in SPECULATIONS}
    for text in texts:
        expected = tokens(plain, text, sampling, count)
        assert len(expected) == count
        for speculation, llm in drafting.items():
            assert tokens(llm, text, sampling, count) == expected, (speculation, sampling, text)
