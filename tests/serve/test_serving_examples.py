"""Tests that the container file, the systemd unit and the Kubernetes manifest fit ``eesd-serve``,
and that the checkers of these formats accept them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support import environments

from eesd.serve.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
CONTAINER, UNIT, MANIFEST = (
    EXAMPLES / name for name in ("Containerfile", "eesd.service", "kubernetes.yaml")
)


def pod() -> dict[str, Any]:
    deployment = next(
        document
        for document in yaml.safe_load_all(MANIFEST.read_text())
        if document["kind"] == "Deployment"
    )
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("file", [CONTAINER, UNIT, MANIFEST], ids=lambda file: file.name)
def test_options_are_those_of_the_command(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    # The command that starts the server, and its continuation lines.
    started = re.findall(r"(?:ENTRYPOINT|CMD|ExecStart=|args:).*(?:\n  --.*)*", "\n".join(lines))
    used = set(re.findall(r"--[a-z-]+", " ".join(started)))
    known = {name for parameter in main.params for name in parameter.opts}
    assert used and used <= known


def test_the_server_has_time_to_drain() -> None:
    unit = UNIT.read_text()
    drain, stop = (
        int(re.search(f"{name}[= ]([0-9]+)", unit)[1])  # type: ignore[index]
        for name in ("--drain-seconds", "TimeoutStopSec")
    )
    assert drain < stop
    spec = pod()
    (container,) = spec["containers"]
    drain = int(container["args"][container["args"].index("--drain-seconds") + 1])
    assert (
        container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain
        < spec["terminationGracePeriodSeconds"]
    )


def test_probes_ask_for_life_and_readiness() -> None:
    (container,) = pod()["containers"]
    paths = [
        container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    ]
    assert paths == ["/health", "/health", "/ready"]
    assert "/health" in CONTAINER.read_text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "eesd.service"
    # The program of the unit must exist.
    unit.write_text(UNIT.read_text().replace("/opt/eesd/bin/eesd-serve", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.slow
def test_their_checkers_accept_the_container_file_and_the_manifest() -> None:
    try:
        programs = environments.make("containers").parent
    except environments.Unavailable as reason:
        pytest.skip(f"no checkers here: {reason}")
    for command in (
        [programs / "hadolint", CONTAINER],
        [programs / "kubernetes-validate", "--strict", MANIFEST],
    ):
        checked = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
