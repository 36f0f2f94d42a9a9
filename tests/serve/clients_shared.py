"""The requests that the programs in this folder make through each client. Each program runs in an
environment with its clients and without this project: ``python PROGRAM URL MODEL [TEXT]`` sends
TEXT to any server, and prints a JSON line with the result of each call."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

BASE = sys.argv[1]
MODEL = sys.argv[2]
KEY = os.environ["OPENAI_API_KEY"] = "none"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # needs no network

COUNT = 16
ROOM = 60
"""The maximum number of tokens in a text, and the maximum number in an object or a call. litellm
requires at least 16 tokens for a text."""
TEXT: str = [*sys.argv, "import os"][3]
CHAT: Any = [{"role": "user", "content": TEXT}]
PROMPT = "def f(x):"


class City(BaseModel):
    """The object requested as JSON."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=4)
    big: bool


def show(client: str, call: str, give: Callable[[], Any]) -> None:
    """Print the result of a call. An object is printed as a dictionary."""
    try:
        found = give()
        found = {"found": found.model_dump() if isinstance(found, BaseModel) else found}
    except Exception as error:  # the test compares it with its expectation
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"client": client, "call": call, **found}), flush=True)
