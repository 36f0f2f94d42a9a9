"""Builds the library of ``runtime/operators/`` with the package. Everything else about the package
is in ``pyproject.toml``.

Without a C++ compiler the package is installed without the library, and ONNX Runtime's own
operators run the models.
"""

import logging
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/eesd/runtime/operators")
LIBRARY = "eesd.runtime.engines.libeesd_operators"
COMMON = [
    *(
        "-std=c++17",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        *(["-fPIC"] if sys.platform != "win32" else []),
    ),
    *(
        "-Wall",
        "-Wextra",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        "-Wno-unknown-warning-option",
    ),
    # The order and the rounding of sums are specified, so that all kernels give the same bits.
    # Nothing from the environment is added: -ffast-math or contraction would change them, and
    # -march=native the processors that can load the library.
    "-ffp-contract=off",
]
KERNELS = ["-fno-exceptions", "-fno-rtti"]
ARM = "-march=armv8.2-a+dotprod"
VECTORS = {
    "x86_64": {
        "avx512": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512vl",
            "-mavx512dq",
            "-mavx512vnni",
            "-mfma",
            "-mf16c",
        ],
        "avx2vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "scalar": ["-O1"],
    },
    "aarch64": {"i8mm": [f"{ARM}+i8mm"], "neon": [ARM], "scalar": []},
}
"""By machine and kernels: what only their code may use. The library looks at the processor before
it calls any of it. No x86-64 processor runs models with the scalar kernels, which the others are
compared with: -O3 takes five times as long."""
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}
"""Names of machines on macOS and Windows."""
LINK = ["-shared"]
if sys.platform == "linux":
    LINK += ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-s", "-pthread"]
WITH_CPP_LIBRARY = ["-static-libstdc++", "-static-libgcc"]
"""The library then needs only the C library, in the version that it was linked with or a later
one."""
WARNING = """
warning: eesd's operators are not built ({reason}).
warning: The package works without them, but on the CPU ONNX Runtime's own operators are 2 to 6
warning: times slower. Install a C++ compiler (g++ or clang++; $CXX names another one), then eesd.
"""


def flags_of(name: str, compiler: list[str]) -> list[str]:
    """The flags for kernels. Those of another machine, or that an old compiler does not know, are
    only named."""
    own = VECTORS.get(MACHINES.get(platform.machine(), platform.machine()), {"scalar": []}).get(
        name
    )
    if own is None or not knows(compiler, own):
        own = ["-DEESD_MISSING"]
    return [*COMMON, *KERNELS, f"-DEESD_KERNELS={name}", *own]


def knows(compiler: list[str], flags: list[str]) -> bool:
    """Whether there is the compiler, and it accepts flags."""
    command = [*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def make_library(library: Path, scratch: Path) -> None:
    """Compile and link.

    Raises:
        RuntimeError: There is no compiler for this system, or it failed.
    """
    default = "clang++" if sys.platform == "win32" else "c++"
    compiler = shlex.split(os.environ.get("CXX") or default, posix=sys.platform != "win32")
    scratch.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    # The slowest to compile are the first.
    names = dict.fromkeys(name for kernels in VECTORS.values() for name in kernels)
    flags = {f"kernels_{name}": ("kernels", flags_of(name, compiler)) for name in names}
    flags |= {source: (source, COMMON) for source in ("operators", "pack")}
    objects = [scratch / f"{made}.o" for made in flags]
    commands = [
        [*compiler, *own, "-c", str(SOURCES / f"{source}.cpp"), "-o", str(made)]
        for made, (source, own) in zip(objects, flags.values(), strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    linker = [*compiler, *map(str, objects), *LINK, "-o", str(library)]
    try:
        run([*linker, *WITH_CPP_LIBRARY])
    except RuntimeError:  # some systems have no static C++ library
        run(linker)


def run(command: list[str]) -> None:
    """Run a compiler. Raises RuntimeError with what it said if it fails."""
    logging.info(shlex.join(command))
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}")


class BuildOperators(build_ext):
    """Builds the library into the package, or warns and goes on."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's name, which says nothing about Python: it does not depend on it."""
        return str(Path(*fullname.split("."))) + (".dll" if sys.platform == "win32" else ".so")

    def run(self) -> None:
        """Build the library, and with ``--inplace`` copy it beside the sources."""
        library = Path(self.get_ext_fullpath(self.extensions[0].name))
        in_build = Path(self.build_lib, self.get_ext_filename(LIBRARY))
        for old in {library, in_build}:  # what is there may be of other sources
            old.unlink(missing_ok=True)
        try:
            make_library(in_build, Path(self.build_temp))
        except RuntimeError as error:
            print(WARNING.format(reason=error), file=sys.stderr)
            self.extensions = self.distribution.ext_modules = []  # a wheel of Python files alone
            return
        if self.inplace:
            self.copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """A wheel for a platform and every version of Python if it has the library, else one for
    everything."""

    def run(self) -> None:
        """Build first: only then it is known which wheel it is."""
        self.run_command("build")
        self.skip_build = True  # or installing into the wheel compiles again
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        tag: tuple[str, str, str] = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*") if path.suffix != ".cpp"),
        )
    ],
    cmdclass={"build_ext": BuildOperators, "bdist_wheel": PlatformWheel},
)
