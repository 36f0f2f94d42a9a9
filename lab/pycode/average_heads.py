"""Average the weights of exit heads from successive runs. The mean has a higher acceptance than
each head.

    python -m lab.pycode.average_heads --model build/work/base build/work/head-1 build/work/head-2 \
        --output build/work/head
"""

from dataclasses import replace
from pathlib import Path

import click
import torch

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_exit_head, save_exit_head


@cli.command()
@click.argument("heads", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(heads: tuple[Path, ...], model: Path, output: Path) -> None:
    """Average the weights of HEADS, which must have the same exit layer and shape."""
    checkpoint = Checkpoint(model)
    loaded = [load_exit_head(checkpoint, directory) for directory in heads]
    # The prior of one head does not fit the mean of all heads.
    configs = {replace(head.exit_config, calibration=None) for head in loaded}
    if len(configs) > 1:
        raise EESDError(
            "The heads have different exit layers or shapes; give heads with the same ones."
        )
    states = [head.state_dict() for head in loaded]
    mean = ExitHead(checkpoint.geometry, configs.pop())
    mean.load_state_dict(
        {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
    )
    save_exit_head(mean, output)


if __name__ == "__main__":
    main()
