"""The mean of exit heads that were trained on from one another: it accepts more than either.

python average_heads.py --model work/base work/head-1 work/head-2 --output work/head
"""

from dataclasses import replace
from pathlib import Path

import click
import torch

from eesd.common.cli import one_line_errors
from eesd.common.errors import EESDError
from eesd.model import exit_head
from eesd.model.checkpoint import Checkpoint


@click.command()
@click.argument("heads", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@one_line_errors
def main(heads: tuple[Path, ...], model: Path, output: Path) -> None:
    """Average the weights of HEADS, which must be of one shape."""
    checkpoint = Checkpoint(model)
    loaded = [checkpoint.exit_head(directory) for directory in heads]
    kinds = {replace(head.exit_config, calibration=None) for head in loaded}  # the mean's confidence is none of theirs
    if len(kinds) > 1:
        raise EESDError("The heads differ in their exit layer or shape; average heads of one kind.")
    loaded[0].exit_config = kinds.pop()
    states = [head.state_dict() for head in loaded]
    mean = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
    loaded[0].float().load_state_dict(mean)
    exit_head.save(loaded[0], output)


if __name__ == "__main__":
    main()
