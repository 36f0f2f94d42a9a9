"""``eesd-serve``: OpenAI's API for a model or an engine directory."""

import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.json_input import read_text
from eesd.common.machine import pip_install, rank
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.cli import drafting_options, load_as_asked, loading_options, speculation_of
from eesd.runtime.engine_options import engine_dir_of, engine_options
from eesd.runtime.llm import Speculation
from eesd.serve.triton.repository import Settings, write_triton_repository

if TYPE_CHECKING:
    from eesd.serve.http.options import ServeOptions

LOG_FORMATS = ("text", "json")
KEYS = "EESD_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine. A server that listens on one of these names accepts requests for any of
them, and for no other name."""
NAMES = (
    "Name of the model in the API; repeatable. Responses have the first name.  [default: "
    "the model's]"
)
HOSTS = (
    "Host name to accept in requests, in addition to the names of this machine; "
    "repeatable.  [default: any, unless --host is a name of this machine]"
)
ORIGINS = (
    "Origin of web pages that may call the API (CORS), such as https://chat.example.com, "
    "or * for all; repeatable."
)
CONFIG = (
    "TOML file with options, such as port = 8080. The command line and EESD_SERVE_* "
    "variables take precedence."
)
PLAIN = (
    "Encode the text of chat messages without special tokens, so that it cannot end a "
    "turn. Fails if the chat template does not allow it."
)
TRITON = "Instead of serving, add a model to this model repository of Triton Inference Server."


def _configure(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Use the values of a configuration file as defaults of the command's options."""
    prefix = f"{ctx.auto_envvar_prefix}_"
    known_variables = {f"{prefix}{str(one.name).upper()}" for one in ctx.command.params}
    for name in sorted(os.environ.keys() - known_variables):
        if name.startswith(prefix):
            raise EESDError(
                f"The variable {name} does not belong to any option; unset it, or see "
                "eesd-serve --help."
            )
    if path is None:
        return
    try:
        given = tomllib.loads(read_text(path, "give UTF-8 text"))
    except tomllib.TOMLDecodeError as error:
        raise EESDError(f"{path} is not TOML ({error}); write lines such as port = 8080.") from None
    known = {option.lstrip("-"): one for one in ctx.command.params for option in one.opts}
    for name, value in given.items():
        if name not in known or name == "config":
            raise EESDError(f"{path}: there is no option {name}; eesd-serve --help lists them all.")
        several = getattr(known[name], "multiple", False)
        if isinstance(value, dict) or (isinstance(value, list) and not several):
            raise EESDError(f"{path}: {name} must be a single value; see eesd-serve --help.")
        if several and not isinstance(value, list):
            given[name] = [value]
    ctx.default_map = {str(known[name].name): value for name, value in given.items()}


@cli.command(environment="EESD_SERVE")
@click.option(
    "--config",
    type=cli.PATH,
    is_eager=True,
    expose_value=False,
    callback=_configure,
    metavar="FILE",
    help=CONFIG,
)
@engine_options
@click.option(
    "--host",
    type=cli.NAME,
    default="127.0.0.1",
    help="Address to listen on. 0.0.0.0 listens on all interfaces.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    help="Port to listen on. 0 picks a free port.",
)
@click.option("--model-name", multiple=True, help=NAMES)
@click.option(
    "--api-key-file",
    type=cli.PATH,
    help=f"File of accepted API keys, one per line.  [default: {KEYS}, else none]",
)
@click.option("--allowed-host", multiple=True, help=HOSTS)
@click.option("--allowed-origin", multiple=True, help=ORIGINS)
@click.option("--metrics-open", is_flag=True, help="Serve /metrics without an API key.")
@click.option("--plain-content", is_flag=True, help=PLAIN)
@click.option(
    "--max-body-bytes", type=cli.BYTES, default=4 << 20, help="Maximum size of a request body."
)
@click.option(
    "--max-prompt-tokens",
    type=int,
    default=0,
    help="Maximum number of tokens in a prompt. 0 means the size of the KV cache.",
)
@click.option(
    "--max-n", type=int, default=64, help="Maximum number of texts per request (prompts times n)."
)
@click.option(
    "--request-timeout",
    type=float,
    default=600.0,
    help="Seconds after which a request ends with the text so far.",
)
@click.option(
    "--body-timeout",
    type=float,
    default=30.0,
    help="Seconds to wait for the headers of a request, and for its body.",
)
@click.option(
    "--send-timeout",
    type=float,
    default=60.0,
    help="Seconds to wait for a client that does not read its response.",
)
@click.option(
    "--drain-seconds",
    type=float,
    default=30.0,
    help="Seconds that running requests have to finish after SIGTERM.",
)
@click.option(
    "--max-rows",
    type=int,
    default=BatchOptions.max_rows,
    help="Maximum number of requests in the batch.",
)
@click.option(
    "--max-queue",
    type=int,
    default=BatchOptions.max_queue,
    help="Maximum number of waiting requests. Further requests get status 429.",
)
@click.option(
    "--prefill-tokens",
    type=int,
    default=BatchOptions.prefill_tokens,
    help="Maximum number of prompt tokens to process in a round, or between two rounds.",
)
@click.option(
    "--kv-memory",
    type=cli.BYTES,
    default=BatchOptions.kv_memory,
    help="Memory for the KV cache, in bytes or with a unit, such as 5GiB.",
)
@click.option(
    "--prefix-memory",
    type=cli.BYTES,
    default=BatchOptions.prefix_memory,
    help="Memory for the prefix cache. 0 disables it.",
)
@drafting_options
@click.option(
    "--levels",
    type=int,
    help=(
        "Number of levels to draft in each round, instead of using --controller.  [default: "
        "chosen by the load]"
    ),
)
@loading_options
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    help="Format of the log on stderr.",
)
@click.option("--triton-repo", type=cli.OUTPUT, metavar="DIR", help=TRITON)
def main(host: str, port: int, **options: Any) -> None:
    """Serve a model or an engine directory with OpenAI's API. A model is exported first.

    One process serves many requests at once. After SIGTERM, running requests may finish.
    """
    batch = batch_of(options)
    speculation = speculation_of(options)
    if options["triton_repo"] is not None:
        _write_triton_repository(options, batch, speculation)
        return
    try:
        from eesd.serve.app import make_app
        from eesd.serve.http.observe import LOGGER, log_to_stderr
        from eesd.serve.http.run import address_of, bind, serve
    except ModuleNotFoundError as error:
        raise EESDError(f"Serving needs {error.name}; {pip_install('serve')}.") from None
    limits = limits_of(options, answers_for_itself=host in LOOPBACK)
    log_to_stderr(options["log_format"])
    if rank() > 0:
        # other ranks run rank 0's calls until it ends; only rank 0 has the port
        load_as_asked(engine_dir_of(options), options, speculation)
    # Bind before the model is loaded, so that a port in use is reported at once.
    with bind(host, port) as bound:
        llm = load_as_asked(engine_dir_of(options), options, speculation)
        app = make_app(Service(llm, batch), limits)
        if not limits.api_keys and not bound.getsockname()[0].startswith(("127.", "::1")):
            LOGGER.warning(
                "Anyone who can reach %s may use it; restrict access with --api-key-file.",
                address_of(bound),
            )
        serve(app, bound)


def _write_triton_repository(
    options: dict[str, Any], batch: BatchOptions, speculation: Speculation | None
) -> None:
    given = {one.name: options[one.name] for one in fields(Settings) if one.name in options}
    given |= {
        "engine_dir": engine_dir_of(options),
        "batch": batch,
        "speculation": speculation,
    }
    directory = write_triton_repository(
        output=options["triton_repo"], name=(*options["model_name"], "eesd")[0], **given
    )
    click.echo(f"{directory} is written; start Triton with --model-repository={directory.parent}")


def batch_of(options: dict[str, Any]) -> BatchOptions:
    """Return the limits of the batch that the command's options set."""
    return BatchOptions(**{field.name: options[field.name] for field in fields(BatchOptions)})


def limits_of(options: dict[str, Any], answers_for_itself: bool = False) -> "ServeOptions":
    """Return the limits and names of a server that the command's options set.

    Args:
        options: The options by name. Missing options have the defaults of
            :class:`~eesd.serve.http.options.ServeOptions`.
        answers_for_itself: If the options name no host, whether the server accepts only requests
            for this machine.

    Raises:
        EESDError: A value cannot be used.
    """
    from eesd.serve.http.options import ServeOptions  # needs the packages for serving

    name, *aliases = options["model_name"] or ("",)
    hosts = options["allowed_host"]
    return ServeOptions(
        model_name=name,
        aliases=tuple(aliases),
        api_keys=api_keys(options["api_key_file"]),
        allowed_hosts=(*hosts, *LOOPBACK) if hosts or answers_for_itself else (),
        allowed_origins=options["allowed_origin"],
        **{
            one.name: options[one.name]
            for one in fields(ServeOptions)
            if one.name in options and one.name != "model_name"
        },
    )


def api_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys in a file, which has one key per line. If there is no file, return the keys
    in EESD_API_KEY, which are separated by commas.

    Raises:
        EESDError: The file has no key.
    """
    if file is None:
        return tuple(key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip())
    keys = tuple(
        line.strip() for line in read_text(file, "give UTF-8 text").splitlines() if line.strip()
    )
    if not keys:
        raise EESDError(f"{file} has no API key; give one per line.")
    return keys


if __name__ == "__main__":
    main()
