"""Distill exit heads for the base model: the plain first version of self-distillation.

    python distill.py --data work/ --base work/base --exit-layers 2,3 --minutes 40 --output work/heads

The base model is frozen. It first continues prompts from the corpus itself, at several temperatures; then the heads learn to
say, from the hidden state after layer N, what the whole model says: KL to its distribution plus cross-entropy on the tokens
that it chose, three quarters on its own text, the rest on the corpus. Heads for several exit layers learn side by side from
one teacher pass; each is written to ``<output>/exit-N``.
"""

import math
import time
from pathlib import Path

import click
import numpy as np
import torch
from pretrain import batches, make_optimizers, schedule
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import LlamaForCausalLM

from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder, causal_inputs, empty_caches
from eesd.model.exit_head import ExitConfig, ExitHead, initialise, save

TEMPERATURES = (0.0, 0.7, 1.0)


@torch.inference_mode()
def generate_own(teacher: LlamaForCausalLM, corpus: np.ndarray, minutes: float, length: int, seed: int) -> np.ndarray:
    """Rows [R, length + 1] of the model's own text, each after a short prompt from the corpus."""
    rng = np.random.default_rng(seed)
    start, rows, batch, prompt = time.monotonic(), [], 256, 33
    while time.monotonic() - start < 60 * minutes:
        temperature = TEMPERATURES[len(rows) % len(TEMPERATURES)]
        at = rng.integers(0, len(corpus) - prompt, batch)
        prompts = torch.from_numpy(np.stack([corpus[i : i + prompt] for i in at]).astype(np.int64))
        out = teacher.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=length + 1 - prompt,
            max_new_tokens=length + 1 - prompt,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            pad_token_id=0,
            cache_implementation="static",
        )
        rows.append(out.numpy().astype(np.uint16))
    return np.concatenate(rows)


def mixed(own: np.ndarray, corpus: np.ndarray, length: int, batch: int, seed: int):
    """Endless batches [batch, length + 1], three quarters of them the model's own text."""
    rng = np.random.default_rng(seed)
    for rows in batches(corpus, length, batch // 4, seed):
        mine = own[rng.integers(0, len(own), batch - batch // 4)]
        yield torch.cat([rows, torch.from_numpy(mine.astype(np.int64))])


def head_logits(decoder: Decoder, head: ExitHead, hidden: Tensor) -> Tensor:
    """The head's logits [B, n, V] on the hidden states [B, n, hidden] of a whole text, causal."""
    batch, tokens = hidden.shape[:2]
    inputs = causal_inputs(decoder.config, batch, tokens, tokens)
    caches = [(k.bfloat16(), v.bfloat16()) for k, v in empty_caches(decoder.config, batch, tokens, len(head.blocks))]
    inputs.cos, inputs.sin, inputs.attn_mask = inputs.cos.bfloat16(), inputs.sin.bfloat16(), inputs.attn_mask.bfloat16()
    return head(hidden, inputs, caches, decoder.lm_head)[0]


def loss_of(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL to the teacher's distribution plus cross-entropy on the teacher's choice, a mean over tokens."""
    student = log_softmax(logits.float().flatten(0, 1), -1)
    teacher = log_softmax(teacher_logits.float().flatten(0, 1), -1)
    kl = kl_div(student, teacher, log_target=True, reduction="batchmean")
    return kl + 0.5 * cross_entropy(logits.float().flatten(0, 1), teacher_logits.flatten(0, 1).argmax(-1))


@torch.no_grad()
def agreement(logits: Tensor, teacher_logits: Tensor) -> float:
    """How often the head's likeliest token is the model's: the acceptance of greedy drafting at depth 1."""
    return (logits.argmax(-1) == teacher_logits.argmax(-1)).float().mean().item()


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("work"), show_default=True)
@click.option("--base", type=click.Path(path_type=Path), default=Path("work/base"), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("work/heads"), show_default=True)
@click.option("--exit-layers", default="2,3", show_default=True)
@click.option("--own-text", type=click.Path(path_type=Path), default=Path("work/own.npy"), help="Made if it is not there.")
@click.option("--generate-minutes", default=14.0, show_default=True, help="Time for the model's own text.")
@click.option("--minutes", default=40.0, show_default=True, help="Time for training the heads.")
@click.option("--length", default=256, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--lr", default=3e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    data: Path,
    base: Path,
    output: Path,
    exit_layers: str,
    own_text: Path,
    generate_minutes: float,
    minutes: float,
    length: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Train exit heads for a frozen base model."""
    torch.manual_seed(seed)
    checkpoint = Checkpoint(base)
    decoder = checkpoint.decoder()
    corpus, heldout = np.load(data / "train.npy"), np.load(data / "heldout.npy")
    teacher = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    teacher.requires_grad_(False)
    if not own_text.exists():
        speaker = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
        np.save(own_text, generate_own(speaker, corpus, generate_minutes, length, seed))
    own = np.load(own_text)
    click.echo(f"{own.size / 1e6:.2f} M tokens of the model's own text")

    layers = [int(layer) for layer in exit_layers.split(",")]
    fingerprint = checkpoint.fingerprint()
    heads = [initialise(decoder, ExitConfig(layer, base=fingerprint, trained=True)) for layer in layers]
    optimizers = [optimizer for head in heads for optimizer in make_optimizers(head, lr, lr)]

    @torch.compile(dynamic=False)
    def teach(ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = teacher(input_ids=ids, use_cache=False, output_hidden_states=True)
        return out.logits, [out.hidden_states[layer] for layer in layers]

    def students(hidden: list[Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [head_logits(decoder, head, x) for head, x in zip(heads, hidden, strict=True)]

    @torch.compile(dynamic=False)
    def learn(hidden: list[Tensor], teacher_logits: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outputs = students(hidden)
        return [loss_of(output, teacher_logits) for output in outputs], outputs

    rows = mixed(own, corpus, length, batch, seed)
    start = math.nan
    step = 0
    while not (progress := (time.monotonic() - start) / (60 * minutes)) >= 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(0.0 if math.isnan(progress) else progress)
        logits, hidden = teach(next(rows)[:, :-1])
        losses, outputs = learn(hidden, logits)
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step == 1:
            start = time.monotonic()  # the first step compiles
        if step % 100 == 0:
            shown = "  ".join(
                f"exit {layer}: loss {loss.item():.3f} agreement {agreement(output, logits):.3f}"
                for layer, loss, output in zip(layers, losses, outputs, strict=True)
            )
            click.echo(f"{progress:6.1%}  step {step}  {shown}")
    rows = batches(heldout, length, batch, seed)
    found: list[list[float]] = []
    for _ in range(8):
        logits, hidden = teach(next(rows)[:, :-1])
        with torch.no_grad():
            found.append([agreement(output, logits) for output in students(hidden)])
    for layer, head, value in zip(layers, heads, np.mean(found, axis=0), strict=True):
        save(head, output / f"exit-{layer}")
        click.echo(f"exit {layer}: agreement on held-out text {value:.3f} after {step} steps")


if __name__ == "__main__":
    main()
