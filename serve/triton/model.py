"""The model that Triton's Python backend loads. Only the Python inside Triton imports this
module."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import triton_python_backend_utils as pb_utils

from eesd.common.errors import EESDError
from eesd.runtime.batch.service import ClosedError, Service
from eesd.runtime.request import QueueFullError
from eesd.serve.triton.inputs import Asked, read_request
from eesd.serve.triton.metrics import Metrics
from eesd.serve.triton.replies import FINAL, Replies, failure
from eesd.serve.triton.repository import read_settings

ORPHAN_SECONDS = 1.0
"""Interval, in seconds, at which the stub process checks whether its server still runs."""


class TritonPythonModel:
    """Takes requests as they come and answers them from another thread, so Triton never waits."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engines. If that raises an error, Triton reports it as the reason for not
        loading the model."""
        Thread(
            target=_end_with, args=(os.getppid(),), name="eesd-triton-orphan", daemon=True
        ).start()
        directory = Path(args["model_repository"], args["model_version"])
        try:
            settings = read_settings(directory)
            llm = settings.load(directory)
            self._service = Service(llm, settings.batch)
        except EESDError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._metrics = Metrics(args["model_name"], args["model_version"])
        self._replies = Replies(self._service, self._metrics)
        self._readers = ThreadPoolExecutor(2, "eesd-triton-grammars")
        if llm.engines.notice:
            pb_utils.Logger.log_warn(llm.engines.notice)

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            with _refusals(sender):
                asked = read_request(request, self._service.llm)
                if asked.guide is None:
                    self._replies.start(sender, asked)
                else:  # in a thread, because a grammar may take long to read
                    self._readers.submit(self._start_guided, sender, asked, *asked.guide)

    def _start_guided(self, sender: Any, asked: Asked, kind: str, value: Any) -> None:
        with _refusals(sender):
            from eesd.runtime.constraint import make_constraint  # imports an optional package

            constraint = make_constraint(kind, value, self._service.llm)
            self._replies.start(
                sender, replace(asked, request=replace(asked.request, constraint=constraint))
            )

    def finalize(self) -> None:
        """End all threads. By then Triton has waited for running requests."""
        self._readers.shutdown()
        self._service.close()
        self._replies.close()


@contextmanager
def _refusals(sender: Any) -> Iterator[None]:
    """If a request is refused in this block, answer it with the reason."""
    try:
        yield
    except EESDError as error:
        busy = isinstance(error, QueueFullError | ClosedError)
        code = pb_utils.TritonError.UNAVAILABLE if busy else pb_utils.TritonError.INVALID_ARG
        sender.send(failure(str(error), code), flags=FINAL)
    except Exception as error:
        # If a request fails, its client receives the error, and the other requests still get their
        # answers.
        pb_utils.Logger.log_error(f"A request failed: {error!r}")
        message = "The request failed; the server's log says why."
        sender.send(failure(message, pb_utils.TritonError.INTERNAL), flags=FINAL)


def _end_with(server: int) -> None:
    """End this process when the server has gone. Without this, the stub process of a killed server
    would live on, with the model and its memory.

    The name of the shared memory is the stub's second argument. Nothing else removes that memory.
    """
    while os.getppid() == server:
        time.sleep(ORPHAN_SECONDS)
    with suppress(OSError, IndexError):
        name = Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode()
        (Path("/dev/shm") / Path(name).name).unlink()
    os._exit(1)
