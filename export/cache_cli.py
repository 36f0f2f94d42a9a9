"""``eesd-cache``: the engine directories that ``--model`` exported, and how to remove them."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import time

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers
from eesd.common.terminal import notice
from eesd.export.cache import Entry, cache_directory, entries, remove
from eesd.export.memory import format_bytes

_DAY = 24 * 3600
_place = click.option(
    "--cache-dir",
    type=cli.PATH,
    envvar="EESD_CACHE_DIR",
    metavar="DIR",
    help="Cache directory.  [default: in the user's cache]",
)


@cli.group()
def main() -> None:
    """Show or remove the engine directories that --model exported into a cache."""


@main.command("list")
@_place
def show(cache_dir: Path | None) -> None:
    """Show each directory with its size, last use, model and options, the longest unused first."""
    cache = cache_directory(cache_dir)
    found = sorted(entries(cache), key=lambda entry: entry.used)
    width = max((len(entry.path.name) for entry in found), default=0)
    for entry in found:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        click.echo(
            (
                f"{entry.path.name:{width}}  {format_bytes(entry.size):>9}  {used}  {entry.model} "
                f"{entry.options}"
            ).rstrip()
        )
    click.echo(f"{cache}: {_count(found)}")


@main.command()
@click.argument("names", nargs=-1, type=cli.NAME)
@click.option("--all", "everything", is_flag=True, help="Remove all directories.")
@click.option(
    "--older-than",
    type=cli.Number(0, 100_000),
    metavar="DAYS",
    help="Remove directories that have not been used for DAYS days.",
)
@_place
def clean(
    names: Sequence[str], everything: bool, older_than: float | None, cache_dir: Path | None
) -> None:
    """Remove the directories with these NAMES, as eesd-cache list shows them.

    Only directories that --model made are removed. A directory with any foreign file is kept.
    """
    if bool(names) + everything + (older_than is not None) != 1:
        raise EESDError("Give exactly one of NAMES, --all and --older-than DAYS.")
    cache = cache_directory(cache_dir)
    remove_leftovers(cache)
    known = {entry.path.name: entry for entry in entries(cache)}
    for name in names:
        if name not in known:
            raise EESDError(
                f"{cache} has no directory {name} that --model made; eesd-cache list shows them."
            )
    oldest = time() - (older_than or 0) * _DAY
    wanted = [known[name] for name in dict.fromkeys(names)] or [
        one for one in known.values() if everything or one.used < oldest
    ]
    removed = [entry for entry in wanted if _removed(entry)]
    click.echo(f"removed {_count(removed)}")


def _removed(entry: Entry) -> bool:
    """Remove a directory, or print why it is kept."""
    kept = remove(entry.path)
    if kept:
        notice(f"{entry.path} is kept: {kept}.")
    return not kept


def _count(found: Sequence[Entry]) -> str:
    directories = "1 directory" if len(found) == 1 else f"{len(found)} directories"
    return f"{directories}, {format_bytes(sum(entry.size for entry in found))}"


if __name__ == "__main__":
    main()
