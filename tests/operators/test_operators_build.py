"""Tests of the library of operators as a part of the package. It is built if there is a C++
compiler. If there is no compiler, the package reports that the library is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import partialmethod
from pathlib import Path

import pytest
from support.command import succeed
from support.on_cache import OnCache
from support.without_operators import needs_operators, without_operators

import eesd
from eesd.common.manifest import load_manifest
from eesd.export.cpu.build import build_for_cpu
from eesd.runtime import doctor
from eesd.runtime.cli import main
from eesd.runtime.engines import operators
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.ort_engine import OrtEngine

ROOT = Path(__file__).parent.parent.parent
LIBRARY = "eesd/runtime/engines/libeesd_operators.so"
PROMPT = [1, 17, 5, 40, 3, 88, 61]
LOAD = (
    "import sys; sys.path.insert(0, sys.argv[1])\nfrom eesd.runtime.engines.operators import "
    "*\nprint(missing() or fastest())"
)

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("c++"),
    reason="there is no C++ compiler, or no Linux",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's sources, without any file that was built here."""
    copy = tmp_path_factory.mktemp("checkout") / "eesd"
    copy.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    rooms = {path.readlink() for path in (ROOT / "src" / "eesd").iterdir() if path.is_symlink()}
    for room in ("src", *(path.name for path in rooms)):
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=ignored)
    return copy


def build(checkout: Path, output: Path, kind: str, compiler: str = "c++") -> tuple[Path, str]:
    """Build a ``wheel`` or ``sdist`` as a frontend does. Returns its path, and the output of the
    build."""
    code = (
        f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    )
    output.mkdir(exist_ok=True)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", code, output],
        cwd=checkout,
        env=os.environ | {"CXX": compiler},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (made,) = output.iterdir()
    return made, done.stderr


@pytest.mark.slow
@needs_compiler
def test_a_wheel_of_the_source_distribution_has_the_library(checkout: Path, tmp_path: Path) -> None:
    source, _ = build(checkout, tmp_path / "sdist", "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    packed = {path.name for path in (unpacked / "src/eesd/runtime/operators").iterdir()}
    assert packed == {path.name for path in (ROOT / "runtime" / "operators").iterdir()}
    compiler = tmp_path / "c++"
    # With the optimization level of the package, compiling takes minutes.
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    wheel, said = build(unpacked, tmp_path / "wheel", "wheel", str(compiler))
    assert re.search(r"-py3-none-linux_[a-z0-9_]+\.whl$", wheel.name) and "not built" not in said
    made = re.findall(r" -o (\S+\.o)\n", (tmp_path / "commands").read_text())
    assert len(made) == len(set(made)) == len(operators.KERNELS) + 2  # each file once
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert LIBRARY in names and "eesd/py.typed" in names
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert "eesd/bench/measure/tasks.jsonl" in names and not [
        name for name in names if name.startswith("lab/")
    ]
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "installed"],
        cwd=tmp_path,
        env=bare(),
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.strip() in (*operators.KERNELS, operators.SLOW), loaded.stderr
    needed = subprocess.run(
        ["ldd", tmp_path / "installed" / LIBRARY], capture_output=True, text=True
    ).stdout
    assert "libstdc++" not in needed and "libgcc" not in needed


def bare() -> dict[str, str]:
    """Returns the environment variables without a path to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_the_wheel_is_for_every_platform(
    checkout: Path, tmp_path: Path, compiler: str
) -> None:
    wheel, said = build(checkout, tmp_path / "wheel", "wheel", compiler)
    assert wheel.name == f"eesd-{eesd.__version__}-py3-none-any.whl"
    assert (
        f"eesd's operators are not built ({compiler}" in said and "Install a C++ compiler" in said
    )
    with zipfile.ZipFile(wheel) as archive:
        assert (
            "eesd/runtime/engines/operators.py" in archive.namelist()
            and LIBRARY not in archive.namelist()
        )
        assert not [name for name in archive.namelist() if ".data/" in name]


@pytest.mark.slow
def test_building_in_place_leaves_nothing_stale(checkout: Path, tmp_path: Path) -> None:
    """``make operators`` and editable installations build the library in place. If there is no
    compiler, even an old library is removed. The compiler is a stub that only writes its output,
    because a real one takes a minute."""
    library = checkout / "runtime" / "engines" / "libeesd_operators.so"
    touch = tmp_path / "c++"
    touch.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    touch.chmod(0o755)
    for compiler in (str(touch), "false"):
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(
            command,
            cwd=checkout,
            env=os.environ | {"CXX": compiler},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert library.exists() == (compiler != "false") == ("not built" not in done.stderr)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not shutil.which("nm"), reason="nm is not installed")
@pytest.mark.parametrize("name", ["avx512", "avx2vnni", "avx2"])
def test_code_for_some_processors_is_in_no_function_that_others_run(
    tmp_path: Path, name: str
) -> None:
    """If several object files contain the same function of the C++ library, the linker keeps one
    copy, which may be compiled for AVX-512."""
    code = f"import setup; sys.stdout.write(' '.join(setup.flags_of('{name}', ['c++'])))"
    stub = "import setuptools, sys; setuptools.setup = lambda **_: None; sys.path.insert(0, '')\n"
    flags = subprocess.run(
        [sys.executable, "-c", stub + code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    source = ROOT / "runtime" / "operators" / "kernels.cpp"
    subprocess.run(["c++", *flags.split(), "-c", source, "-o", tmp_path / "kernels.o"], check=True)
    symbols = subprocess.run(
        ["nm", tmp_path / "kernels.o"], capture_output=True, text=True, check=True
    ).stdout
    assert not re.findall(r" [WVu] .*", symbols) and f"{name}_kernels" in symbols


def tokens_of(directory: Path) -> list[int]:
    llm = eesd.load(directory, threads=1)
    return llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True).tokens


@needs_operators()
def test_without_the_library_tokens_are_equal_and_the_log_says_why(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--engine-dir", engine, "-p", "hello", "-n", 8, "--no-stats")
    own = tokens_of(engine)
    said = succeed(main, *options)
    assert not caplog.messages
    with without_operators():
        assert isinstance(eesd.load(engine, threads=1).engines.verify, OrtEngine)
        assert tokens_of(engine) == own
        standard = succeed(main, *options)
    assert standard.stdout == said.stdout
    assert len(caplog.messages) == 3 and all(
        "install a C++ compiler" in message for message in caplog.messages
    )


@needs_operators()
def test_all_kernels_give_the_same_logits(engine: Path) -> None:
    manifest = load_manifest(engine)
    packed = build_for_cpu(engine, manifest)
    found = []
    for name in operators.supported():
        loaded = CpuEngine(packed, manifest, manifest.verify, 1, kernels=name)
        binding = OnCache(loaded, loaded.new_kv_caches()[0])
        found.append(binding.forward(PROMPT, range(len(PROMPT)), 0).logits.tobytes())
    assert len(found) > 1 and len(set(found)) == 1


@pytest.mark.parametrize("name", ["avx2", "scalar"])
@needs_operators()
def test_slower_kernels_give_the_same_tokens(
    engine: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in operators.supported():
        pytest.skip(f"this processor has no {name}")
    expected = tokens_of(engine)
    monkeypatch.setattr(CpuEngine, "__init__", partialmethod(CpuEngine.__init__, kernels=name))
    assert tokens_of(engine) == expected


def own_operators() -> str:
    found: str = json.loads(succeed(doctor.main, "--json").stdout)["jobs"]["own operators"]
    return found


@needs_operators()
def test_the_doctor_names_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_operators() == f"yes, {operators.fastest()} kernels"
    with monkeypatch.context() as patched:
        patched.setattr(operators, "missing", lambda: operators.SLOW)
        assert own_operators().startswith("no: this processor has neither AVX2")
    with without_operators():
        assert (
            own_operators().startswith("no: not built")
            and "pip install --force-reinstall" in own_operators()
        )
        (tmp_path / "broken.so").write_bytes(b"no library")
        with monkeypatch.context() as patched:  # undone before the library is restored
            patched.setattr(operators, "LIBRARY", tmp_path / "broken.so")
            assert own_operators().startswith("no: broken.so cannot be loaded")
