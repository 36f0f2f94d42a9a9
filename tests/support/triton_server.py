"""A real ``tritonserver`` on this machine's processors, from the package nvidia-pytriton."""

import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from support.environments import site_packages, variables
from support.ports import free_ports
from support.processes import end_session, processes

START_SECONDS = 60.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class TritonServer:
    """A running server. ``grpc``, ``http`` and ``metrics`` are addresses of the form HOST:PORT."""

    process: "subprocess.Popen[bytes]"
    log: Path
    prefix: str
    http: str
    grpc: str
    metrics: str

    def get(self, path: str, address: str = "") -> str:
        """Returns the body of an HTTP answer. Raises URLError for every status except 2xx."""
        return self.post(path, None, address)

    def post(self, path: str, body: bytes | None, address: str = "") -> str:
        with urlopen(
            Request(f"http://{address or self.http}{path}", data=body), timeout=30
        ) as response:
            return str(response.read().decode())

    def ready(self, path: str = "/v2/health/ready", address: str = "") -> bool:
        with suppress(OSError):  # URLError, and errors of reading
            self.get(path, address)
            return True
        return False

    def stubs(self) -> list[int]:
        """Returns the running processes of the Python backend."""
        return [
            pid
            for pid, command in processes(self.process.pid)
            if "triton_python_backend_stub" in command
        ]

    def shared_memory(self) -> list[Path]:
        return sorted(SHARED_MEMORY.glob(f"{self.prefix}*"))


@contextmanager
def triton_server(python: Path, repository: Path, scratch: Path) -> Iterator[TritonServer]:
    """Start a server, wait until it is ready, and clean up afterwards. No stub and no shared memory
    remain."""
    packages = site_packages(python)
    found = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    # The backend searches for its stub and its helper next to itself, and for its libraries next to
    # its real file, so they are links, not copies.
    backend = scratch / "backends" / "python"
    backend.mkdir(parents=True)
    parts = [
        *(found / "backends/python").glob("*.*"),
        found / "python_backend_stubs" / version / "triton_python_backend_stub",
    ]
    for part in parts:
        (backend / part.name).symlink_to(part)
    http, grpc, metrics = free_ports(3)
    prefix = f"eesd_test_{os.getpid()}_{http}_"
    command = [
        str(found / "bin/tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backend.parent}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--allow-gpu-metrics=false",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-timeout-secs=5",
        *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
        *(
            f"--{name}-port={port}"
            for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics))
        ),
    ]
    library = str(sysconfig.get_config_var("LIBDIR"))  # the stub is linked with libpython
    log = scratch / "triton.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=variables(python, LD_LIBRARY_PATH=library),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    addresses = [f"127.0.0.1:{port}" for port in (http, grpc, metrics)]
    server = TritonServer(process, log, prefix, *addresses)
    try:
        _wait(server)
        yield server
    finally:
        _stop(server)


def _wait(server: TritonServer) -> None:
    end = time.monotonic() + START_SECONDS
    # Triton reports that it is ready before its metrics service, which starts last, listens.
    while not (server.ready() and server.ready("/metrics", server.metrics)):
        assert server.process.poll() is None and time.monotonic() < end, server.log.read_text()
        time.sleep(0.1)


def _stop(server: TritonServer) -> None:
    server.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(30)
    end_session(server.process)  # including stubs that outlived it
    for path in server.shared_memory():
        path.unlink(missing_ok=True)
