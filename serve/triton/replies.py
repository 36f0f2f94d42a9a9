"""The thread that answers Triton's clients. Only the Python inside Triton imports this module."""

from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from eesd.runtime.batch.service import Service
from eesd.runtime.request import Generation, Update
from eesd.serve.triton.inputs import Asked
from eesd.serve.triton.metrics import Metrics

POLL_SECONDS = 0.05
"""Interval, in seconds, at which the thread checks whether clients have cancelled. Each check sends
a message to the server for each request."""
LEAST = -9999.0
"""Represents the logarithm of zero, which JSON cannot write."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(eq=False)
class Reply:
    """A request that is being answered.

    Attributes:
        sender: Triton's response sender.
        asked: The request of the client.
        generation: The generation of the request in the batch, or None until the request is
            submitted.
        start: Time at which the request arrived.
        text, tokens, logprobs: Output that has not been sent yet.
        total: Sum of all log-probabilities so far.
        started: Whether a token has been generated.
    """

    sender: Any
    asked: Asked
    start: float
    generation: Generation | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total: float = 0.0
    started: bool = False

    def __post_init__(self) -> None:
        self.text = self.asked.prefix


class Replies:
    """Sends the output of the batch and cancels abandoned requests, in a separate thread.

    A separate thread is needed because messages to the server take longer than the batch should
    wait, and because the batch must not be called from two places.
    """

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._updates: SimpleQueue[tuple[Reply, Update] | None] = SimpleQueue()
        self._open: set[Reply] = set()
        self._lock = Lock()
        self._thread = Thread(target=self._run, name="eesd-triton-replies", daemon=True)
        self._thread.start()

    def start(self, sender: Any, asked: Asked) -> None:
        """Submit a request to the batch, and answer it.

        Raises:
            EESDError: The batch refuses the request. Nothing was sent.
        """
        reply = Reply(sender, asked, monotonic())
        with self._lock:
            self._open.add(reply)
        try:
            reply.generation = self._service.submit(
                asked.request, lambda update: self._updates.put((reply, update))
            )
        except BaseException:
            self._forget(reply)
            raise

    def close(self) -> None:
        """End the thread after all earlier output has been sent."""
        self._updates.put(None)
        self._thread.join()

    def _forget(self, reply: Reply) -> None:
        with self._lock:
            self._open.discard(reply)

    def _run(self) -> None:
        polled = monotonic()
        while True:
            item: tuple[Reply, Update] | Empty | None
            try:
                item = self._updates.get(timeout=POLL_SECONDS)
            except Empty as nothing:
                item = nothing
            if item is None:
                return
            if isinstance(item, tuple):
                self._see(*item)
            if monotonic() - polled >= POLL_SECONDS:
                self._poll()
                polled = monotonic()

    def _poll(self) -> None:
        """Cancel requests whose clients no longer wait for them."""
        with self._lock:
            waiting = [
                reply for reply in self._open if reply.generation and not reply.generation.cancelled
            ]
        for reply in waiting:
            if reply.generation and reply.sender.is_cancelled():
                reply.generation.cancel()
        self._metrics.load(self._service)

    def _see(self, reply: Reply, update: Update) -> None:
        """Process the output of a round. Send it if the client receives a stream, or if the text
        has ended."""
        if update.tokens and not reply.started:
            reply.started = True
            self._metrics.first_token(monotonic() - reply.start)
        reply.text += "".join(output.text for output in update.tokens) + update.held
        reply.tokens += [output.token for output in update.tokens]
        found = [output.logprob.logprob for output in update.tokens if output.logprob]
        reply.logprobs += [max(value, LEAST) for value in found if value is not None]
        if update.finish_reason is None and not (reply.asked.stream and update.tokens):
            return
        reply.total += sum(reply.logprobs)
        try:
            reply.sender.send(_response(reply, update), flags=FINAL if update.finish_reason else 0)
        except Exception as error:
            # If a response cannot be sent, other clients still get their answers.
            pb_utils.Logger.log_error(f"A response could not be sent: {error}")
            if reply.generation:
                reply.generation.cancel()
        reply.text = ""
        reply.tokens = []
        reply.logprobs = []
        if update.finish_reason:
            self._forget(reply)
            self._metrics.ended(update.finish_reason, update.stats)


def _response(reply: Reply, update: Update) -> Any:
    """Return a response with the output that has not been sent yet, or with the error."""
    if update.finish_reason == "error":
        code = pb_utils.TritonError.INVALID_ARG if update.refused else pb_utils.TritonError.INTERNAL
        return failure(update.error or "The request failed; the server's log says why.", code)
    if update.finish_reason == "cancelled":
        if reply.generation and reply.generation.cancelled:
            return failure("The request was cancelled.", pb_utils.TritonError.CANCELLED)
        return failure(
            "The model is being unloaded; send the request again.", pb_utils.TritonError.UNAVAILABLE
        )
    # Use plain tensors instead of DLPack. The server copies outputs into shared memory in any case,
    # and its stub never returns from reading a DLPack capsule of numpy, because the stub gives the
    # capsule a name that numpy does not know.
    outputs = [
        pb_utils.Tensor("text_output", np.array([reply.text.encode()], dtype=np.object_)),
        pb_utils.Tensor("output_ids", np.array(reply.tokens, dtype=np.int32)),
        pb_utils.Tensor(
            "finish_reason", np.array([(update.finish_reason or "").encode()], dtype=np.object_)
        ),
    ]
    if reply.asked.request.logprobs is not None:
        outputs.append(
            pb_utils.Tensor("output_log_probs", np.array(reply.logprobs, dtype=np.float32))
        )
        outputs.append(pb_utils.Tensor("cum_log_probs", np.array([reply.total], dtype=np.float32)))
    return pb_utils.InferenceResponse(outputs)


def failure(message: str, code: int) -> Any:
    """Return a response with an error message of one sentence."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
