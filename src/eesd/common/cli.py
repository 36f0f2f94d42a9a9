"""The common parts of the commands: help settings, and errors as one line with an exit code."""

import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import click

from eesd.common.errors import EESDError

P = ParamSpec("P")


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Make a click callback report :class:`EESDError` and unreadable files as ``error: ...`` with exit code 2.

    Ctrl-C ends with 130 and a reader that went away with 141, as shells expect, without a traceback.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
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
    """Make SIGTERM end the program as an exception does, with exit code 143: what is half made is deleted on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def fail(message: str) -> None:
    """Print ``error: message`` in one line to stderr and leave with exit code 2."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
