"""Choose a command's engine directory. It is the given directory, or the directory of a model,
which is exported on first use."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.manifest import MAX_SLOTS
from eesd.common.quantization import DTYPES, QUANTIZED

MODEL = (
    "Model directory, GGUF file, Hugging Face id, or short name such as llama-70b. The "
    "first start exports it into a cache, and later starts reuse the export."
)
AS_EXPORT = "With --model; see eesd-export."
CACHE = "Cache directory for exported models.  [default: EESD_CACHE_DIR, else in the user's cache]"
EXPORT_OPTIONS = ("exit_head", "exit_layer", "dtype", "quantize", "max_seq_len")
engine_options = cli.options(
    click.option("--model", type=cli.NAME, help=MODEL),
    click.option("--exit-head", type=cli.NAME, help=AS_EXPORT),
    click.option("--exit-layer", type=click.IntRange(1, 10_000), help=AS_EXPORT),
    click.option("--dtype", type=click.Choice(DTYPES), help=AS_EXPORT),
    click.option("--quantize", type=click.Choice((*QUANTIZED, "none", "keep")), help=AS_EXPORT),
    click.option("--max-seq-len", type=click.IntRange(2, MAX_SLOTS), help=AS_EXPORT),
    click.option("--cache-dir", type=cli.PATH, envvar="EESD_CACHE_DIR", metavar="DIR", help=CACHE),
    click.option(
        "--engine-dir",
        type=cli.PATH,
        help="Engine directory written by eesd-export, instead of --model.",
    ),
)
"""Command-line options that choose the engine directory; see :func:`engine_dir_of`."""


def engine_dir_of(options: dict[str, Any]) -> Path:
    """Return the engine directory that a command's options name. If they name a model that is not
    in the cache, it is exported.

    Raises:
        EESDError: The options do not name a directory, or they name two directories, or the model
            cannot be exported.
    """
    directory: Path | None = options["engine_dir"]
    model: str | None = options["model"]
    given = {name: options[name] for name in EXPORT_OPTIONS}
    if directory is not None and model is not None:
        raise EESDError("--model and --engine-dir cannot be used together; give one of them.")
    if directory is not None:
        other = next((name for name, value in given.items() if value is not None), None)
        if other is not None:
            raise EESDError(
                f"--{other.replace('_', '-')} needs --model, and --engine-dir is exported already; "
                "leave it out."
            )
        context = click.get_current_context()
        # An environment variable may be meant for other commands.
        if context.get_parameter_source("cache_dir") is ParameterSource.COMMANDLINE:
            raise EESDError("--cache-dir needs --model; leave it out.")
        return directory
    if model is None:
        raise EESDError(
            "There is no model; give --model NAME, or --engine-dir DIR with a directory that "
            "eesd-export wrote."
        )
    from eesd.export.prepare import engine_directory

    return engine_directory(model, given, options["cache_dir"], options.get("backend", "auto"))
