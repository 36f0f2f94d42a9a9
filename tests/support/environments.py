"""Makes environments for packages that conflict with the packages of this project. ``python
tests/support/environments.py NAME`` makes one environment.

Each environment is a virtual environment ``build/environments/NAME`` with the packages of
``tests/environments/NAME.txt``. It finds the code of this checkout by a ``.pth`` file, because
Triton's stub does not read ``PYTHONPATH``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]


class Unavailable(Exception):
    """An environment cannot be made here. The message says why."""


def make(name: str) -> Path:
    """Returns the Python interpreter of an environment. The environment is made if it is missing or
    its list of packages has changed.

    Raises:
        Unavailable: Its packages cannot be installed.
    """
    packages = ROOT / "tests" / "environments" / f"{name}.txt"
    directory = ROOT / "build" / "environments" / name
    python = directory / "bin" / "python"
    done = directory / "packages.txt"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if done.exists() and done.read_text() == packages.read_text():
            return python
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary",
            ":all:",
            "-r",
            str(packages),
        ]
        _install(install, packages)
        (site_packages(python) / "eesd.pth").write_text(f"{ROOT / 'src'}\n")
        shutil.copy(packages, done)
        return python


def make_npm(name: str) -> Path:
    """Returns a directory with exactly the npm packages that are listed in
    ``tests/environments/NAME/package-lock.json``.

    Raises:
        Unavailable: They cannot be installed.
    """
    lists = ROOT / "tests" / "environments" / name
    directory = ROOT / "build" / "environments" / f"{name}-npm"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        done = directory / "node_modules" / ".done"
        wanted = (lists / "package-lock.json").read_text()
        if done.exists() and done.read_text() == wanted:
            return directory
        shutil.copytree(lists, directory, dirs_exist_ok=True)
        install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
        _install(install, lists, directory)
        done.write_text(wanted)
        return directory


def _install(command: list[str], listed: Path, directory: Path | None = None) -> None:
    """Run a command that installs the ``listed`` packages. Raises :class:`Unavailable` if it
    fails."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"{Path(command[0]).name} failed"]
        raise Unavailable(
            f"the packages of {listed.relative_to(ROOT)} cannot be installed: {reason[0]}"
        )


def site_packages(python: Path) -> Path:
    """Returns the directory that contains an environment's packages."""
    return next((python.parents[1] / "lib").glob("python3.*/site-packages"))


def variables(python: Path, **more: str) -> dict[str, str]:
    """Returns environment variables. With these variables, a process and the Python inside it use
    only the packages of an environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return kept | {
        "PATH": os.pathsep.join([str(python.parent), kept.get("PATH", os.defpath)]),
        **more,
    }


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(make(wanted))
