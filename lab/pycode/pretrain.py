"""Train a small Llama or Qwen3 on the corpus for a given number of steps.

    python -m lab.pycode.pretrain --data build/work/ --steps 420 --output build/work/base

Uses Muon for the blocks' matrices, AdamW for embeddings and norms, and bf16 autocast. Writes a
Hugging Face directory in bfloat16, and ``training.json`` with the validation losses. ``--float32``
also writes the weights as they were trained to ``<output>-float32``.

Every five minutes, the directories are written with the current model, and the state of the
training is written to ``<output>-checkpoint.pt``. ``--resume`` continues from there. If ``--steps``
is different then, training follows the schedule of the new number. A slow run can thus end sooner
and still have a falling learning rate.

With ``--early-exit``, the model learns to exit early through its own norm and LM head. This follows
the recipe of LayerSkip (arXiv 2404.16710). Layers are dropped (later layers more often), and every
few layers also have a loss.
"""

import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from eesd.common.files import directory_written_whole, written_whole

FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}

# Compiled, eager attention is a third faster than the CPU's flash kernel at these lengths.
ATTENTION = "eager"

SAVE_SECONDS = 300


def batches(ids: np.ndarray, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield shuffled windows [batch, length + 1] forever. Each epoch splits the corpus at another
    offset."""
    rng = np.random.default_rng(seed)
    while True:
        offset = int(rng.integers(length))
        starts = rng.permutation(np.arange(offset, len(ids) - length - 1, length))
        for at in range(0, len(starts) - batch + 1, batch):
            rows = np.stack([ids[s : s + length + 1] for s in starts[at : at + batch]])
            yield torch.from_numpy(rows.astype(np.int64))


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class EarlyExits:
    """Adds layer dropout and early-exit losses to a model in training.

    Layer l of L is dropped for a text with the probability ``dropout * (2 ** (l / (L - 1)) - 1)``.
    The loss of an exit after layer l has the weight ``scale * (0 + 1 + ... + l)``. The loss of the
    last layer has the weight of the exit before it plus L - 1. In each step, one of every
    ``rotation`` layers has a loss. The layers take turns. Weights are divided by their sum.
    """

    def __init__(self, model: PreTrainedModel, scale: float, dropout: float, rotation: int) -> None:
        self.model = model
        self.scale = scale
        self.dropout = dropout
        self.rotation = rotation
        self.step = 0
        self.states = list[Tensor]()
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_hook(
                lambda _, given, found, index=index: self._behind(index, given[0], found)
            )

    def _behind(self, index: int, before: Tensor, after: Tensor) -> Tensor:
        if not self.model.training:
            return after
        chance = self.dropout * (2 ** (index / (len(self.model.model.layers) - 1)) - 1)
        kept = torch.rand(len(after), 1, 1) >= chance
        self.states.append(torch.where(kept, after, before))
        return self.states[-1]

    def loss(self, rows: Tensor) -> Tensor:
        self.states, last = [], len(self.model.model.layers) - 1
        self.model.train()
        with torch.autocast("cpu", torch.bfloat16):
            self.model.model(input_ids=rows[:, :-1], use_cache=False)
            total = torch.zeros(())
            weights = 0.0
            for index, state in enumerate(self.states):
                if index < last and (index + self.step) % self.rotation:
                    continue
                weight = (
                    self.scale * index * (index + 1) / 2
                    if index < last
                    else last + self.scale * last * (last - 1) / 2
                )
                logits = self.model.lm_head(self.model.model.norm(state)).float()
                total = total + weight * torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), rows[:, 1:].flatten()
                )
                weights += weight
        self.step += 1
        self.model.eval()
        return total / weights


@torch.no_grad()
def validation_loss(
    model: torch.nn.Module, ids: np.ndarray, length: int, micro: int, passes: int = 4
) -> float:
    starts = np.linspace(0, len(ids) - length - 2, micro * passes).astype(int)
    rows = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64))
    return float(np.mean([loss_of(model, part).item() for part in rows.split(micro)]))


def schedule(progress: float, decay: float = 0.55, warmup: float = 0.01) -> float:
    """Return the factor of the learning rate. It has a linear warm-up, a plateau, and a linear
    decay to 0.02 over the last fraction ``decay``."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, 0.02 + 0.98 * (1 - progress) / decay)


def make_optimizers(
    model: torch.nn.Module, lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    matrices = [
        p
        for n, p in model.named_parameters()
        if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    ]
    matrix_ids = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def make_model(
    family: str, vocab_size: int, hidden: int, intermediate: int, layers: int
) -> PreTrainedModel:
    """Return a model with fresh weights. Its heads have size 64, and each KV head has two query
    heads. The layers' outputs begin small."""
    config = FAMILIES[family](
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        rope_theta=10000.0,
        initializer_range=0.02,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1 / math.sqrt(2 * layers))
    return model


def _foreign(directory: Path) -> str:
    return "" if (directory / "training.json").exists() else "no training wrote it"


def save(
    model: PreTrainedModel,
    data: Path,
    output: Path,
    dtype: torch.dtype,
    training: dict[str, object],
) -> None:
    """Write the Hugging Face directory ``output`` with weights of ``dtype``. Replaces an earlier
    directory."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    # A tied LM head is stored once, as the embedding table.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {n: value.to(dtype) for n, value in model.state_dict().items() if n not in tied}
    with directory_written_whole(output, _foreign) as directory:
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory, state_dict=state)
        config = json.loads((directory / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (directory / "training.json").write_text(json.dumps(training, indent=2) + "\n")
        AutoTokenizer.from_pretrained(directory)


@click.command()
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("build/work"), show_default=True
)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("build/work/base"), show_default=True
)
@click.option("--steps", default=760, show_default=True)
@click.option("--family", type=click.Choice(sorted(FAMILIES)), default="llama", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--hidden", default=256, show_default=True)
@click.option("--intermediate", default=448, show_default=True)
@click.option(
    "--length",
    default=256,
    show_default=True,
    help="Tokens in a window; doubled in the last fifth of the steps.",
)
@click.option("--micro", default=16, show_default=True, help="Windows in a forward pass.")
@click.option("--accumulate", default=3, show_default=True, help="Forward passes in a step.")
@click.option(
    "--lr",
    default=5e-3,
    show_default=True,
    help="Learning rate of Muon, whose updates are scaled to match AdamW's.",
)
@click.option("--adam-lr", default=4e-3, show_default=True, help="Learning rate of AdamW.")
@click.option(
    "--decay",
    default=0.55,
    show_default=True,
    help="Fraction of the steps with a falling learning rate.",
)
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    help="Start from this model; the options for its shape do not matter.",
)
@click.option("--resume", is_flag=True, help="Continue from the checkpoint beside the output.")
@click.option("--float32", is_flag=True, help="Also write the weights as trained.")
@click.option("--compiled/--eager", default=True, show_default=True, help="Compile the layers.")
@click.option(
    "--early-exit",
    default=0.0,
    show_default=True,
    help="Weight of the losses of early exits, such as 0.2.",
)
@click.option(
    "--layer-dropout",
    default=0.1,
    show_default=True,
    help="With --early-exit: how often the last layer is dropped.",
)
@click.option(
    "--rotation",
    default=8,
    show_default=True,
    help="With --early-exit: one of this number of layers has a loss in a step.",
)
@click.option("--seed", default=0, show_default=True)
def main(
    data: Path,
    output: Path,
    steps: int,
    family: str,
    layers: int,
    hidden: int,
    intermediate: int,
    length: int,
    micro: int,
    accumulate: int,
    lr: float,
    adam_lr: float,
    decay: float,
    init: Path | None,
    resume: bool,
    float32: bool,
    compiled: bool,
    early_exit: float,
    layer_dropout: float,
    rotation: int,
    seed: int,
) -> None:
    """Train the base model."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if init is not None:
        model = AutoModelForCausalLM.from_pretrained(
            init, dtype=torch.float32, attn_implementation=ATTENTION
        )
    else:
        vocab_size = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
        model = make_model(family, vocab_size, hidden, intermediate, layers)
    if compiled and not early_exit:
        for layer in model.model.layers:  # all have the same code, so it is compiled once
            layer.compile(dynamic=False)
    exits = EarlyExits(model, early_exit, layer_dropout, rotation) if early_exit else None
    optimizers = make_optimizers(model, lr, adam_lr)
    train = np.load(data / "train.npy")
    heldout = np.load(data / "heldout.npy")
    click.echo(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(train) / 1e6:.1f} M tokens"
    )

    checkpoint = output.with_name(output.name + "-checkpoint.pt")
    step = tokens = short_steps = 0
    log: list[dict[str, float]] = []
    if resume:
        stored = torch.load(checkpoint)
        step = stored["step"]
        tokens = stored["tokens"]
        short_steps = stored["short_steps"]
        log = stored["log"]
        model.load_state_dict(stored["model"])
        torch.set_rng_state(stored["rng"])
        for optimizer, state in zip(optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        click.echo(f"resumed after {step} steps")

    def store() -> None:
        with written_whole(checkpoint) as temporary:
            torch.save(
                {
                    "step": step,
                    "tokens": tokens,
                    "short_steps": short_steps,
                    "log": log,
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "rng": torch.get_rng_state(),
                },
                temporary,
            )
        training = {"steps": step, "of": steps, "tokens": tokens, "seed": seed, "log": log}
        save(model, data, output, torch.bfloat16, training)
        if float32:
            save(model, data, output.with_name(output.name + "-float32"), torch.float32, training)

    rows = batches(train, length, micro, seed)
    long = False
    for _ in range(accumulate * short_steps):
        next(rows)  # seen before the checkpoint
    # Compile before the clock starts.
    loss_of(model, next(batches(train, length, micro, seed))).backward()
    model.zero_grad()
    start = saved = time.monotonic()
    first = tokens
    while step < steps:
        progress = step / steps
        if progress > 0.8 and not long:
            long = True
            length = 2 * length
            micro = micro // 2
            rows = batches(train, length, micro, seed + 1)
            for _ in range(accumulate * (step - short_steps)):
                next(rows)
        for optimizer, base in zip(optimizers, (lr, adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * schedule(progress, decay)
        losses = []
        for part in itertools.islice(rows, accumulate):
            loss = exits.loss(part) if exits else loss_of(model, part)
            (loss / accumulate).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        short_steps += not long
        tokens += accumulate * micro * length
        if step % 10 == 0:
            rate = (tokens - first) / (time.monotonic() - start)
            click.echo(
                f"{progress:6.1%}  step {step:5}  loss {np.mean(losses):.4f}  "
                f"{tokens / 1e6:6.2f} M  {rate:.0f} tokens/s"
            )
        if step % 100 == 0:
            value = validation_loss(model, heldout, length, micro)
            log.append({"step": step, "tokens": tokens, "validation_loss": value})
            click.echo(f"        validation loss {value:.4f}")
        if time.monotonic() - saved > SAVE_SECONDS:
            store()
            saved = time.monotonic()
    final = validation_loss(model, heldout, length, micro, passes=32)
    log.append({"step": step, "tokens": tokens, "validation_loss": final})
    store()
    click.echo(f"done: {step} steps, validation loss {final:.4f}")


if __name__ == "__main__":
    main()
