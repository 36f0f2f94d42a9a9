"""One of several processes that share a model's weights. The process generates with and without
drafting, and rank 0 writes the results.

torchrun --nproc-per-node K team_member.py DIRECTORY OUTPUT
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

from eesd.common.manifest import load_manifest
from eesd.runtime.compare import compare
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.llm import LLM, Speculation

PROMPTS = ([5, 9, 3], [token % 97 for token in range(3, 50)])
WAYS = {
    "chain": (Speculation("fixed:k=4", guard=False, drafter="exit"), Sampling()),
    "tree": (
        Speculation("calibration-ts", 2, guard=False, drafter="exit"),
        Sampling(temperature=0.9, seed=4),
    ),
    "rejection": (
        Speculation("fixed:k=3", guard=False, drafter="exit"),
        Sampling(temperature=0.9, seed=4, method="rejection"),
    ),
}
"""The ways of drafting and of sampling that are tested."""


def main(directory: Path, output: Path) -> None:
    found: dict[str, object] = {}
    manifest = load_manifest(directory)
    # This function returns only on rank 0.
    engines = open_engines(directory, manifest, EngineOptions("torch", 1, True))
    for name, (speculation, sampling) in WAYS.items():
        llm = LLM(directory, manifest, engines, speculation, prefix_memory=1 << 20)
        made = [
            llm.generate(prompt, sampling, max_new_tokens=24, ignore_eos=True) for prompt in PROMPTS
        ]
        # this prompt finds kept keys and values
        again = llm.generate(PROMPTS[1], sampling, max_new_tokens=24, ignore_eos=True)
        found[name] = [one.tokens for one in (*made, again)]
        if not speculation.tree:  # a tree's budget depends on times
            found[f"{name}, tokens a round"] = sum(24 for _ in made) / sum(
                one.stats.rounds for one in made
            )
    compared = compare(llm, PROMPTS[0], Sampling(), 16, ignore_eos=True)
    found["drafting differs"] = compared.logits.differing + (compared.divergence is not None)
    with llm.session(PROMPTS[1], max_new_tokens=1) as session:
        found["logits"] = sha256(session.peek().tobytes()).hexdigest()
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
