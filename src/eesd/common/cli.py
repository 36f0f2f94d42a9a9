"""The common parts of the commands: help and version options, and errors as one line with an exit code."""

import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click

import eesd
from eesd.common.errors import EESDError

P = ParamSpec("P")
C = TypeVar("C", bound=click.Command)
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


def command(**settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """``click.command(**settings)`` with ``-h``, ``--version``, shown defaults, and :func:`one_line_errors`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        made = click.command(None, click.Command, context_settings=HELP, **settings)(one_line_errors(function))
        return _with_version(made)

    return decorate


def group(**settings: Any) -> Callable[[Callable[..., None]], click.Group]:
    """The same for ``click.group``."""

    def decorate(function: Callable[..., None]) -> click.Group:
        made = click.command(None, click.Group, context_settings=HELP, **settings)(one_line_errors(function))
        return _with_version(made)

    return decorate


def _with_version(made: C) -> C:
    return click.version_option(eesd.__version__, message="%(prog)s %(version)s")(made)


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
