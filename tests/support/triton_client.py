"""Streams requests to Triton over gRPC:
``python triton_client.py ADDRESS MODEL SECONDS < REQUESTS``, with Triton's own client.

REQUESTS is a JSON list. Each entry has the ``inputs`` by name. It may have ``cancel_after`` (a
number of responses) and ``timeout`` (in microseconds). All requests are sent at once, in separate
streams. Each response is printed as a JSON line, and ``final`` marks the last response to a
request. A request without an answer for SECONDS ends with the error "timeout".
"""

import json
import queue
import sys
import threading
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

KINDS = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "stop_words": "BYTES",
    "stream": "BOOL",
    "ignore_eos": "BOOL",
    "exclude_input_in_output": "BOOL",
    "temperature": "FP32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "seed": "UINT64",
    "random_seed": "UINT64",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "return_log_probs": "BOOL",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
}
TYPES = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "INT32": np.int32,
}
PRINTING = threading.Lock()


def tensor(name: str, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    kind = KINDS.get(name, "INT32")
    array: Any = np.array(
        [v.encode() if isinstance(v, str) else v for v in values], dtype=TYPES[kind]
    )
    made = grpc.InferInput(name, [len(values)], kind)
    made.set_data_from_numpy(array)
    return made


def show(number: int, **what: Any) -> None:
    with PRINTING:
        print(json.dumps({"request": number, **what}), flush=True)


def stream(address: str, model: str, seconds: float, number: int, asked: dict[str, Any]) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpc.InferenceServerClient(address)
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [tensor(name, value) for name, value in asked["inputs"].items()]
    client.async_stream_infer(
        model, inputs, enable_empty_final_response=True, timeout=asked.get("timeout")
    )
    count = 0
    while True:
        try:
            result, error = answers.get(timeout=seconds)
        except queue.Empty:
            show(number, error="timeout", final=True)
            break
        if error:
            show(number, error=str(error.message()), status=str(error.status()), final=True)
            break
        final = result.get_response().parameters["triton_final_response"].bool_param
        text, reason = (
            result.as_numpy(name)[0].decode() for name in ("text_output", "finish_reason")
        )
        logprobs, total = (result.as_numpy(name) for name in ("output_log_probs", "cum_log_probs"))
        more = {} if logprobs is None else {"logprobs": logprobs.tolist(), "total": float(total[0])}
        show(
            number,
            **more,
            text=text,
            ids=result.as_numpy("output_ids").tolist(),
            reason=reason,
            final=final,
        )
        count += 1
        if final:
            break
        if count == asked.get("cancel_after"):
            client.stop_stream(cancel_requests=True)
            show(number, cancelled=True, final=True)
            return
    client.stop_stream(cancel_requests=True)


def main(address: str, model: str, seconds: str) -> None:
    requests = json.load(sys.stdin)
    threads = [
        threading.Thread(target=stream, args=(address, model, float(seconds), number, asked))
        for number, asked in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
