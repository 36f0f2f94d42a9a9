"""The common parts of the commands: help and version options, and errors as one line with an exit code."""

import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import click

import eesd
from eesd.common.errors import EESDError

P = ParamSpec("P")


def command(**settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """``click.command`` with ``-h``, ``--version``, shown defaults, and :func:`one_line_errors`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        context = {"help_option_names": ["-h", "--help"], "show_default": True}
        made = click.command(context_settings=context, **settings)(one_line_errors(function))
        return click.version_option(eesd.__version__, message="%(prog)s %(version)s")(made)

    return decorate


def one_line_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Make a click callback report :class:`EESDError` and unreadable files as ``error: ...`` with exit code 2.

    Ctrl-C exits with 130, and a closed output pipe with 141, as shells expect, without a traceback.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except EESDError as error:
            fail(str(error))
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(141)
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            fail(f"{error.strerror or error}{place}.")

    return run


def clean_up_on_sigterm() -> None:
    """Make SIGTERM end the program like an exception, with exit code 143, so that partial output is deleted on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def fail(message: str) -> None:
    """Print ``error: message`` in one line to stderr and exit with code 2."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
