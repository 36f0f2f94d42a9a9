"""``python -m eesd.serve.triton ENGINE_DIR REPOSITORY``: write a model repository for Triton Inference Server."""

from pathlib import Path

import click

from eesd.common import cli
from eesd.runtime.engines.backends import BACKENDS
from eesd.serve.triton.repository import write_triton_repository


@cli.command()
@click.argument("engine_dir", type=cli.PATH)
@click.argument("repository", type=cli.PATH)
@click.option("--name", type=cli.NAME, default="eesd", help="The model's name.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto")
@click.option("--threads", type=int, help="CPU threads.  [default: processors, one fewer if over four]")
def main(engine_dir: Path, repository: Path, name: str, backend: str, threads: int | None) -> None:
    """Write a model repository that serves ENGINE_DIR with Triton Inference Server."""
    directory = write_triton_repository(engine_dir, repository, name=name, backend=backend, threads=threads)
    click.echo(f"{directory}: start Triton with --model-repository={directory.parent}")


if __name__ == "__main__":
    main(prog_name="python -m eesd.serve.triton")
