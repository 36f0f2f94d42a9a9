"""Use EESD's controllers in your own engine. This example is a greedy loop over a toy draft and a
toy verifier.

    python examples/embedding/controllers.py

The toy computes its seconds by a fixed rule, so that each run prints the same text. A real engine
measures seconds.
"""

import numpy as np

from eesd.controllers import Controller, DraftStep, RoundOutcome, make_controller

VOCAB = 512
VERIFIER = 2 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
DRAFT = VERIFIER + np.random.default_rng(1).normal(size=VERIFIER.shape)
"""The logits of the next token, by row. The last token and its position select the row."""
STEP = 0.1
PASS = 1.0
NODE = 0.02
"""The seconds that a draft step, a verify pass, and each node of the pass take."""


def generate(controller: Controller, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Returns the ``count`` tokens after a prompt, and the seconds that they take."""
    tokens = list(prompt)
    seconds = 0.0
    controller.begin_request()
    while len(tokens) < len(prompt) + count:
        drafted = list[int]()
        path = 1.0
        room = len(prompt) + count - len(tokens) - 1  # the bonus token must fit after the draft
        wanted = controller.begin_round(1) != 0
        while wanted and len(drafted) < room:
            logits = DRAFT[row(drafted[-1] if drafted else tokens[-1], len(tokens) + len(drafted))]
            second, first = np.sort(logits)[-2:].tolist()
            probability = float(1 / np.exp(logits - first).sum())
            drafted.append(int(logits.argmax()))
            path *= probability
            step = DraftStep(len(drafted), probability, path, first - second, nodes=len(drafted))
            wanted = len(drafted) < room and controller.keep_drafting(step)
        rows = [row(token, len(tokens) + i) for i, token in enumerate([tokens[-1], *drafted])]
        chosen = VERIFIER[rows].argmax(-1).tolist()  # one pass over the root and the draft
        accepted = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
        steps = len(drafted)
        cost = (STEP * len(drafted), PASS + NODE * len(rows))
        outcome = RoundOutcome(
            steps, cost[0], steps, steps, cost[1], accepted, num_expanded=accepted
        )
        if controller.value is not None:
            controller.value.observe(outcome)  # updates the costs, before observe() uses them
        controller.observe(outcome)
        tokens += chosen[: accepted + 1]
        seconds += sum(cost)
    return tokens[len(prompt) :], seconds


def row(token: int, position: int) -> int:
    return (31 * token + position) % VOCAB


if __name__ == "__main__":
    for name in ("fixed:k=1", "fixed:k=4", "beta-ts", "calibration-ts", "cost-aware-ts"):
        made, took = generate(make_controller(name, seed=0), [1, 2, 3], 2000)
        print(
            f"{name:15} {len(made) / took:.2f} tokens a second; plain decoding: "
            f"{1 / (PASS + NODE):.2f}"
        )
