"""``python -m eesd.bench.tools.device_sampling``: milliseconds that a verified node's choice takes, from logits on a device.

The host's way copies the logits and samples there; the device's way copies the tokens. Both take turns, with new positions in
every pass, so both make their noise.
"""

import time
from statistics import median

import click
import torch

from eesd.common.cli import command
from eesd.common.errors import EESDError
from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.samplers import SpecSampler, make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.engines.device import DeviceStream, device_streams
from eesd.runtime.engines.device_engine import fetch

SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=0.7, top_k=40),
    "top-p": Sampling(temperature=0.7, top_p=0.9),
    "all": Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1),
    "greedy, penalty": Sampling(repetition_penalty=1.1),
}


@command()
@click.option("--vocab", type=click.IntRange(2), default=128_256, help="Tokens of the vocabulary.")
@click.option("--nodes", type=click.IntRange(1), default=9, help="Nodes of a pass.")
@click.option("--passes", type=click.IntRange(1), default=32, help="Timed passes of each way; the first two are left out.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", help="Where the logits are.")
def main(vocab: int, nodes: int, passes: int, device: str) -> None:
    """Time both ways for each kind of sampling, and check that the tokens are the same."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EESDError("torch sees no GPU; take --device cpu, which shows the work but not the speed of a GPU.")
    (stream,) = device_streams(1, device)
    with stream.activate(), torch.inference_mode():
        generator = torch.Generator(stream.device).manual_seed(0)
        logits = torch.randn((nodes, vocab), generator=generator, device=stream.device) * 3
    for name, sampling in SAMPLINGS.items():
        ways = [make_sampler(sampling, vocab) for _ in range(2)]
        times: list[list[float]] = [[], []]
        for number in range(passes + 2):
            tokens = [index % vocab for index in range(100 + nodes * number)]
            found = [_timed(way, logits, tokens, stream, index == 1) for index, way in enumerate(ways)]
            if found[0][0] != found[1][0]:
                raise EESDError(f"{name}: the device chose other tokens than the host; please report it.")
            for spent, (_, seconds) in zip(times, found, strict=True):
                spent.append(seconds / nodes * 1e3)
        host, there = (median(spent[2:]) for spent in times)
        mean = sum(times[1][2:]) / passes
        click.echo(f"{name}: host {host:.3f} ms a node, device {there:.3f} ms (mean {mean:.3f}, with the making of noise)")


def _timed(
    sampler: SpecSampler, logits: torch.Tensor, tokens: list[int], stream: DeviceStream, on_device: bool
) -> tuple[list[int], float]:
    """The tokens that are chosen behind a chain of nodes, and the seconds that it took."""
    chain = [Node(tokens[-1], index=0)]
    for index in range(1, len(logits)):
        chain.append(Node(index, chain[-1], index, index=index))
    sampler.begin_round(tokens)
    stream.synchronize()
    started = time.perf_counter()
    choose = sampler.chooser(chain, 0) if on_device else None
    chosen = None
    if choose is not None:
        with stream.activate(), torch.inference_mode():
            chosen = fetch(lambda: choose(logits), stream)
    outputs = StepOutputs(lambda: fetch(lambda: logits, stream), chosen=chosen)  # type: ignore[arg-type]
    found = [sampler.accept(node, outputs).bonus_token for node in chain]
    return found, time.perf_counter() - started


if __name__ == "__main__":
    main()
