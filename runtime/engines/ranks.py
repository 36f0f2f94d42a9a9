"""How the processes of a split model talk. Rank 0 has two connections to each of the others: one for data, and one that tells
who is there.

Gloo is not used. Its threads free the tensors of a call some time after the call; where Python has begun to end by then, it
ends such a thread inside a destructor, and C++ aborts the process.
"""

import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

from torch.distributed.rendezvous import rendezvous

from eesd.common.errors import EESDError

PATIENCE = 600.0
"""Seconds in which all ranks must have started."""
LEAVING = 60.0
"""Seconds that rank 0 waits for the others to end."""
ADDRESS = "eesd: port and key of rank 0"
"""In the store that the processes were started with."""


class Ranks:
    """The connections of this process: those of rank 0 to all others in their order, and of another one to rank 0.

    Attributes:
        store: Where the processes found each other.
        rank, count: The number of this process, and how many there are.
        at_end: What all ranks do when rank 0 ends.
    """

    rank: int
    count: int
    _met = False

    def __init__(self) -> None:
        """Meet the others, where torchrun says: in ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

        Raises:
            EESDError: They do not come, or these processes share a model already.
        """
        if Ranks._met:
            raise EESDError("These processes share a model already; start others for another one.")
        Ranks._met = True
        try:
            self.store, self.rank, self.count = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
            found = self._accepted() if self.rank == 0 else self._connected()
        except (ValueError, RuntimeError, OSError) as error:
            raise EESDError(f"The ranks do not find each other ({str(error)[:200]}); start them with torchrun.") from None
        for connection in found:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data, self._life = found[::2], found[1::2]
        self._leaving, self._ending = False, threading.Lock()
        self.at_end: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """From now on end this process when another one ends: it might wait for that one forever, in the middle of a sum."""
        threading.Thread(target=self._watch, name="eesd-ranks", daemon=True).start()

    def send(self, data: bytes | bytearray) -> None:
        """Send what rank 0 has to all others."""
        for number in range(1, self.count):
            self._send(number, data)

    def receive(self) -> bytearray:
        """What rank 0 sent."""
        return self._received(0)

    def gather(self, own: bytes) -> list[bytearray]:
        """What each rank has, in their order, on every rank; all of one size."""
        if self.rank:
            self._send(0, own)
            whole = self.receive()
        else:
            whole = bytearray().join([own, *(self._received(number) for number in range(1, self.count))])
            self.send(whole)
        return [whole[at : at + len(own)] for at in range(0, len(whole), len(own))]

    def leave(self) -> None:
        """End the other processes, whatever they do, with exit code 0, and wait until they have gone. For rank 0."""
        self._leaving = True
        for life in self._life:
            life.settimeout(LEAVING)
            with suppress(OSError):
                life.sendall(b".")
        self.at_end()
        for life in self._life:
            with suppress(OSError):
                life.recv(1)

    def _accepted(self) -> list[socket.socket]:
        """The connections that the others make. What does not know the key, which is in the store, is none of them."""
        key, found = secrets.token_hex(16), dict[int, socket.socket]()
        with socket.create_server(("127.0.0.1" if _on_one_machine() else "", 0)) as server:
            self.store.set(ADDRESS, f"{server.getsockname()[1]} {key}")
            server.settimeout(PATIENCE)
            while len(found) < 2 * (self.count - 1):
                connection, _ = server.accept()
                with suppress(OSError):
                    connection.settimeout(PATIENCE)
                    hello = bytes(_exactly(connection, len(key) + 8))
                    if secrets.compare_digest(hello[:-8], key.encode()):
                        found[int.from_bytes(hello[-8:], "little")] = connection
                        continue
                connection.close()
        return [found[number] for number in sorted(found)]

    def _connected(self) -> list[socket.socket]:
        port, key = self.store.get(ADDRESS).decode().split()
        host = "127.0.0.1" if _on_one_machine() else os.environ["MASTER_ADDR"]
        found = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(2)]
        for number, connection in enumerate(found, 2 * self.rank):
            connection.sendall(key.encode() + number.to_bytes(8, "little"))
        return found

    def _send(self, number: int, data: bytes | bytearray) -> None:
        with self._expected(number) as connection:
            connection.sendall(len(data).to_bytes(8, "little") + data)

    def _received(self, number: int) -> bytearray:
        with self._expected(number) as connection:
            return _exactly(connection, int.from_bytes(_exactly(connection, 8), "little"))

    @contextmanager
    def _expected(self, number: int) -> Iterator[socket.socket]:
        """The connection to a rank that must be there. The watch says why it is not."""
        try:
            yield self._data[max(number - 1, 0)]
        except OSError:
            self._watch()
            raise

    def _watch(self) -> None:
        """Wait until another process ends, or rank 0 says that this one shall."""
        numbers = {life: number for number, life in enumerate(self._life, 0 if self.rank else 1)}
        changed = select.select(list(numbers), [], [])[0][0]
        with suppress(OSError):
            self._leaving = self._leaving or changed.recv(1) == b"."
        if self.rank or not self._leaving:
            self._end(numbers[changed])

    def _end(self, number: int) -> NoReturn:
        """End this process, once, from whichever thread: the others may wait in a library that no exception reaches."""
        self._ending.acquire()
        if self._leaving:
            threading.Timer(LEAVING / 2, os._exit, (0,)).start()  # in a sum that does not end, at_end may wait forever
            self.at_end()
        else:
            print(f"error: Rank {number} has ended; see what it printed, and start all again.", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0 if self._leaving else 1)


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises :class:`ConnectionError` if the other side has gone."""
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the other process has ended")
        rest = rest[count:]
    return found
