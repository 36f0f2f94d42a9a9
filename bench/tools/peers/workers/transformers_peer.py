"""Hugging Face transformers on torch in float32; with prompt lookup, or drafting by its own first layers."""

import time
from pathlib import Path
from typing import Any

PACKAGE = "transformers"
LOOKUP_TOKENS = 10
"""Of the example in its documentation."""


def load(path: str, options: dict[str, Any]) -> "Contestant":
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(Path(path), dtype=torch.float32)
    # Without an EOS nothing stops early, and no logits are changed, as min_new_tokens would.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    modes = {
        "plain": {},
        "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "early-exit": {"assistant_early_exit": options["exit_layer"]},
    }
    return Contestant(model, modes[options["mode"]])


class Stamps:
    """A streamer that notes when tokens come. The first call brings the prompt."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.prompt_seen = False
        self.seconds: list[float] = []

    def put(self, tokens: Any) -> None:
        if self.prompt_seen:
            self.seconds += [time.perf_counter() - self.started] * tokens.numel()
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


class Contestant:
    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self.model = model
        self.settings = settings

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        import torch

        stamps = Stamps(time.perf_counter())
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            streamer=stamps,
            **self.settings,
        )
        return out[0, len(prompt) :].tolist(), stamps.seconds[:count]

    def logits(self, tokens: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().numpy()
