"""Entry points of the commands. Ctrl-C ends a command without a traceback, even while the command
is being imported."""

import signal
import sys
from functools import partial
from types import TracebackType


def _start(module: str) -> None:
    """Import a command and run it.

    There is nothing to clean up during the import or after the command. At these times, Ctrl-C ends
    the process at once, as for programs that are not written in Python. A command that the shell
    started in the background with Ctrl-C ignored keeps ignoring it.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.excepthook = _report
    from importlib import import_module

    main = import_module(module).main
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except (KeyboardInterrupt, SystemError) as error:
        # Ctrl-C came again while the first was reported, or an extension module ignored it. In the
        # second case Python raises a SystemError.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        sys.exit(130)
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception that ends the process. Ctrl-C may arrive again between any two lines
    above, and needs no report."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


distill = partial(_start, "eesd.distill.cli")
export = partial(_start, "eesd.export.cli")
build = partial(_start, "eesd.export.build")
inspect = partial(_start, "eesd.export.inspect")
cache = partial(_start, "eesd.export.cache_cli")
run = partial(_start, "eesd.runtime.cli")
doctor = partial(_start, "eesd.runtime.doctor")
bench = partial(_start, "eesd.bench.cli")
serve = partial(_start, "eesd.serve.cli")
