"""This module holds the common parts of the commands. It defines their options, sets up streams and
signals, and reports an error as one line with an exit code."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from re import fullmatch
from typing import Any, TextIO, TypeVar

import click

import eesd
from eesd.common.errors import EESDError, shortened
from eesd.common.outputs import resolved

C = TypeVar("C", bound=click.Command)
F = TypeVar("F", bound=Callable[..., Any])
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


class _Path(click.Path):
    """A path. An empty path, such as the value of an unset shell variable, is refused because it
    would mean the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; give a path", param, ctx)
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        try:
            str(resolved(path)).encode()  # ONNX Runtime, among others, opens only UTF-8 names
        except OSError:
            self.fail(f"the links of {path} lead in a circle; give another path", param, ctx)
        except UnicodeEncodeError:
            self.fail(f"the name of {str(path)!a} is not UTF-8; give another path", param, ctx)
        return path


class _Output(_Path):
    """A path that a command writes. Links and ".." are resolved when the command begins, because
    they may change later."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        whole = resolved(path)
        return path if Path.cwd() / path == whole else whole


class _Name(click.types.StringParamType):
    """Text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; give a name", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number from ``min`` to ``max``. Unlike click's range it refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class _Bytes(click.types.StringParamType):
    """A number of bytes, optionally with a unit such as GB or GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b)?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value} is not a number of bytes; give one such as 5GiB or 5GB", param, ctx)
        number, unit, binary = found.groups()
        if not unit:
            return int(number)
        return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit))


PATH = _Path(path_type=Path)
OUTPUT = _Output(path_type=Path)
NAME = _Name()
BYTES = _Bytes()
SEED = click.IntRange(0, 2**32 - 1)


class _Command(click.Command):
    """A command that ends with one line and an exit code, whatever happens."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _check_streams()
        _exit_on_signals()
        return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_errors():
            return super().invoke(ctx)


class _Group(_Command, click.Group):
    command_class = _Command


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that gives a command several options, in this order."""

    def decorate(command: F) -> F:
        for option in reversed(several):
            command = option(command)
        return command

    return decorate


def command(
    environment: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """This decorator is ``click.command(**settings)`` with ``-h`` and ``--version``. It also shows
    defaults in the help, and prints errors in one line.

    If ``environment`` is given, each option can also be set by a variable, such as
    ``EESD_SERVE_PORT`` for ``--port``.
    """
    context = HELP | {"auto_envvar_prefix": environment}
    return lambda function: _with_version(
        click.command(None, _Command, context_settings=context, **settings)(function)
    )


def group(**settings: Any) -> Callable[[Callable[..., None]], click.Group]:
    """``click.group`` with the same additions as :func:`command`."""
    return lambda function: _with_version(
        click.command(None, _Group, context_settings=HELP, **settings)(function)
    )


def _with_version(made: C) -> C:
    return click.version_option(eesd.__version__, message="%(prog)s %(version)s")(made)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Report :class:`EESDError`, wrong options and unreadable files as ``error: ...`` with exit
    code 2.

    Ctrl-C exits with code 130, and a closed output pipe exits with code 141. Neither shows a
    traceback. Shells expect this.
    """
    try:
        yield
        sys.stdout.flush()
    except EESDError as error:
        fail(str(error))
    except click.UsageError as error:
        program = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        fail(shortened(f"{error.format_message().rstrip('.')}{program}."))
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(130)
    except BrokenPipeError:
        _give_up_broken_streams()
        sys.exit(141)
    except MemoryError:
        fail("There is not enough memory; give smaller values, or use a larger machine.")
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        remedy = "; free some space, or write to another place" if error.errno in _FULL else ""
        fail(shortened(f"{error.strerror or error}{place}{remedy}."))


def _check_streams() -> None:
    """Protect a program that was started with closed streams. In such a program, a file could get
    the descriptor of a standard stream and receive the output of libraries.

    Without stderr, messages are dropped. Without stdout the program ends, because its result would
    be lost.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = _null()
    if sys.stdout is None:
        fail("stdout is closed; redirect it to a file, or to /dev/null.")


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _give_up_broken_streams() -> None:
    """Redirect broken standard streams, so that Python does not try to flush them at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the program like an exception, so that partial output is deleted
    on the way out."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            with suppress(ValueError):  # allowed in the main thread only
                signal.signal(number, lambda number, _: sys.exit(128 + number))


def fail(message: str) -> None:
    """Print ``error: message`` in one line to stderr and exit with code 2."""
    try:
        click.echo(f"error: {' '.join(message.split())}", err=True)
    except OSError:
        _give_up_broken_streams()
    sys.exit(2)
