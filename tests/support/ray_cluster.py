"""A Ray cluster of one node on the loopback interface, with applications of Ray Serve."""

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from support.environments import variables
from support.ports import free_ports
from support.processes import end_session, processes

START_SECONDS = 120.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SOON = {"RAY_metrics_report_interval_ms": "500"}
"""With the first, Ray's servers listen on 127.0.0.1 and not on all interfaces."""


@dataclass(frozen=True)
class RayCluster:
    """Applications that are ready. ``url`` is that of Serve, ``metrics`` that of Ray's own
    metrics."""

    url: str
    metrics: str
    session: int
    logs: Path

    def replicas(self, deployment: str, application: str = "default") -> list[int]:
        """Processes that run replicas of a deployment."""
        name = f"ServeReplica:{application}:{deployment}"
        return sorted(pid for pid, command in processes(self.session) if name in command)


@contextmanager
def ray_cluster(python: Path, applications: Sequence[dict[str, Any]]) -> Iterator[RayCluster]:
    """Start Ray and applications, wait until the ``/ready`` of each answers, and end all of it.

    Args:
        python: The Python of an environment with Ray.
        applications: As in a configuration file of Serve.
    """
    # Not pytest's directory: paths of Unix sockets must be short.
    scratch = Path(tempfile.mkdtemp(prefix="eesd-ray-", dir="/tmp"))
    ray, client, agent, http, metrics = free_ports(5)
    config = {
        "http_options": {"host": "127.0.0.1", "port": http},
        "applications": list(applications),
    }
    (scratch / "serve.yaml").write_text(json.dumps(config))  # JSON is YAML
    start = (
        f"--head --block --num-cpus=2 --object-store-memory={80 << 20} --include-dashboard=false "
        "--disable-usage-stats"
    )
    start += (
        f" --node-ip-address=127.0.0.1 --port={ray} --ray-client-server-port={client} "
        f"--temp-dir={scratch / 'ray'}"
    )
    start += f" --dashboard-agent-listen-port={agent} --metrics-export-port={metrics}"
    programs = [
        ["ray", "start", *start.split()],
        ["serve", "run", f"--address=127.0.0.1:{ray}", str(scratch / "serve.yaml")],
    ]
    log = scratch / "log.txt"
    running: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as file:
            for number, (name, *options) in enumerate(programs):
                if number:
                    _wait(running[0], log, f"127.0.0.1:{ray}")
                command = [str(python.parent / name), *options]
                process = subprocess.Popen(
                    command,
                    env=variables(python, **LOOPBACK, **SOON),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
                running.append(process)
        url = f"http://127.0.0.1:{http}"
        for application in applications:
            _wait(running[1], log, url + application["route_prefix"].rstrip("/"))
        yield RayCluster(
            url, f"http://127.0.0.1:{metrics}/metrics", running[0].pid, scratch / "ray"
        )
    finally:
        for process in reversed(running):
            end_session(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _wait(process: "subprocess.Popen[bytes]", log: Path, what: str) -> None:
    """Wait until a port is open, or a URL's ``/ready`` answers."""
    end = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError, URLError):
            if what.startswith("http"):
                urlopen(f"{what}/ready", timeout=5).close()
            else:
                host, port = what.split(":")
                socket.create_connection((host, int(port)), timeout=5).close()
            return
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.2)
