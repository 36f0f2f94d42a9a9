"""Threads that run one at a time, in an order that a seed determines."""

import random
import threading
from collections.abc import Callable


class Turns:
    """Runs several functions, each in a separate thread. Only one thread runs at a time, and
    ``pass_on`` may choose another thread."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._now = -1
        self._errors: list[BaseException] = []

    def run(self, *functions: Callable[[], object]) -> None:
        """Run the functions until all have ended. If a function raised an exception, the exception
        is raised again."""
        self._waiting = [*range(len(functions))]
        threads = [
            threading.Thread(target=self._run, args=(number, one))
            for number, one in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        self._choose()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def pass_on(self) -> None:
        """Perhaps switch to another thread, and wait for the next turn."""
        own = self._now
        self._choose()
        self._wait(own)

    def _run(self, number: int, function: Callable[[], object]) -> None:
        self._wait(number)
        try:
            function()
        except BaseException as error:
            self._errors.append(error)
        self._waiting.remove(number)
        self._choose()

    def _choose(self) -> None:
        with self._changed:
            self._now = self._random.choice(self._waiting) if self._waiting else -1
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._now == number)


class TurnLock:
    """A lock that passes the turn on while it waits."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self._turns.pass_on()
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
