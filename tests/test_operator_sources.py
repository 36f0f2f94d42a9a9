"""The operators' C++ under sanitizers, and with mistakes made on purpose, which the checks of the operators must catch."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.operators import Attention, Product, assert_same, attend, check_product, load, prefill, random_weight, tree

from eesd.runtime.engines import operators
from eesd.runtime.engines.operators import make_session
from eesd.runtime.engines.panels import NARROW, SPLIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ for x86-64"),
]

SOURCES = Path(operators.__file__).parents[1] / "operators"
CHECKS = Path(__file__).with_name("operators")
FLAGS = ("-std=c++17", "-ffp-contract=off")
KERNELS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "scalar": (),
}


def compile_all(*commands: list[str]) -> None:
    """Run compilers side by side."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands]
    for process in running:
        output = process.communicate()[0]
        assert process.returncode == 0, output[-3000:]


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Products and attention over odd sizes in memory of just their size; all kernels give the same bits."""
    flags = [*FLAGS, "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
    files = {SOURCES / f"kernels_{name}.cpp": options for name, options in KERNELS.items()} | {CHECKS / "check_kernels.cpp": ()}
    objects = [str(tmp_path / f"{path.stem}.o") for path in files]
    commands = [
        ["g++", *flags, *options, "-c", str(path), "-o", to] for (path, options), to in zip(files.items(), objects, strict=True)
    ]
    compile_all(*commands)
    compile_all(["g++", "-fsanitize=address,undefined", *objects, "-o", str(tmp_path / "check")])
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, env={**os.environ, "ASAN_OPTIONS": ""})
    assert done.returncode == 0 and done.stdout == "equal bits\n", done.stdout[-2000:] + done.stderr[-4000:]


def check_products(path: Path) -> None:
    """Levels with minimums and without, and floats, with one scale for 32 or 16 inputs."""
    random = np.random.default_rng(0)
    for int8 in (True, False):
        for form, fine, minimums in (
            ("bits4", False, True),
            ("bits6", True, False),
            ("bits5", True, True),
            ("float16", False, False),
        ):
            weight = random_weight(random, form, 96, 33, fine, NARROW, minimums)
            norm = random.normal(1, 0.3, 96).astype(np.float32)
            check_product(Product([weight], norm), path, int8, ["scalar"], (1, 2))


def check_split_scales(path: Path) -> None:
    """Scales and minimums with factors of their own for 256 inputs."""
    random = np.random.default_rng(0)
    for fine in (True, False):
        weight = random_weight(random, "bits4", 512, 33, fine, SPLIT, True)
        check_product(Product([weight]), path, True, ["scalar"], (1, 2))


def check_trees(path: Path) -> None:
    """Nodes of a tree against the specification, in other slots than their places."""
    layer = Attention()
    text = layer.text(70, [69, 70, 70, 71, 71, 72, 75, 74])
    session = make_session(layer.write(path), 1, True, "scalar")
    prefill(session, text, 70)
    assert_same(attend(session, tree(text, 70, 78, 90))[0], layer.specified(text, range(70, 78)))


def check_chunks(path: Path) -> None:
    """A long text against the specification, in one call and token by token, by one thread and two."""
    layer = Attention(norms=True)
    text = layer.text(300)
    some = [0, 62, 63, 64, 127, 128, 129, 255, 256, 299]
    expected = layer.specified(text, some)
    for threads in (1, 2):
        session = make_session(layer.write(path), threads, True, "scalar")
        assert_same(prefill(session, text, 300)[some], expected)
        assert_same(prefill(session, text, 300, (60, 1))[some], expected)


MUTANTS: dict[str, tuple[str, str, str, Callable[[Path], None]]] = {
    "wrong ancestor": ("attention.h", "token.path[position - token.context]", "token.path[0]", check_trees),
    "next ancestor": (
        "attention.h",
        "token.path[position - token.context]",
        "token.path[least(position - token.context + 1, token.path_length - 1)]",
        check_trees,
    ),
    "stale slot": ("attention.h", "position < token.context ? position", "position <= token.context ? position", check_trees),
    "tile behind the context": ("attention.h", "first + 16 <= token.context", "first <= token.context", check_trees),
    "key in another slot": ("attention.h", "token.slot % 16;", "(token.slot + 1) % 16;", check_trees),
    "value of a stale slot": (
        "attention.h",
        "values + slot * width, width * 4",
        "values + position * width, width * 4",
        check_trees,
    ),
    "split one chunk short": ("operators.cpp", "split ? share + 1 : chunks", "split ? share + 1 : chunks - 1", check_chunks),
    "split one chunk late": (
        "operators.cpp",
        "first_chunk = split ? share : 0",
        "first_chunk = split ? share : 1",
        check_chunks,
    ),
    "part of the work left out": (
        "session.h",
        "own.count * (at + 1) / own.parts",
        "own.count * (at + 1) / own.parts - at",
        check_products,
    ),
    "wrong merge order": (
        "attention.h",
        "for (int64_t c = 1; c < chunks; c++) merge(part, job.part(t, h, c), job.width);",
        "for (int64_t c = chunks - 1; c > 0; c--) merge(part, job.part(t, h, c), job.width);",
        check_chunks,
    ),
    "sum not scaled in a merge": ("attention.h", "fma(all(part[1]), old_factor,", "fma(all(part[1]), all(1.f),", check_chunks),
    "one position too few": (
        "attention.h",
        "least(seen, CHUNK), part}",
        "least(seen > 1 ? seen - 1 : 1, CHUNK), part}",
        check_chunks,
    ),
    "dropped scale of activations": ("integers.h", ", all(a.scales[block]))", ", all(1.f))", check_products),
    "dropped scale of weights": (
        "products.h",
        "fma(add(even[m], odd[m]), scale, sum[m])",
        "fma(add(even[m], odd[m]), all(1.f), sum[m])",
        check_products,
    ),
    "dropped minimum": ("integers.h", "if (minimums) sum[m]", "if (false) sum[m]", check_products),
    "dropped minimum, float32": ("products.h", "if (w.minimums) sum[m]", "if (false) sum[m]", check_products),
    "dropped zero": ("integers.h", "-w.zero * a.sums[fine][part]", "0", check_products),
    "dropped zero, float32": ("products.h", "all((float)w.zero)", "all(0)", check_products),
    "half of another block": ("integers.h", "load_scales(w, scales, h,", "load_scales(w, scales, 0,", check_products),
    "half of another block, float32": ("products.h", "load_scales(w, scales, h,", "load_scales(w, scales, 0,", check_products),
    "factors of another scale": ("kernels.h", "block / SUPER * (SUPER", "0 * (SUPER", check_split_scales),
    "factors of scales for minimums": ("levels.h", "factors + PANEL * 2", "factors", check_split_scales),
    "dropped factor": ("levels.h", "mul(load_int8((const int8_t *)p + index * PANEL), ", "(", check_split_scales),
    "norm without epsilon": ("rows.h", "(float)size + epsilon", "(float)size", check_products),
}
"""By name: file, what is replaced, by what, and the check that must fail."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Kernels that no processor supports in the place of the fast ones: mutants are compiled without them."""
    directory = tmp_path_factory.mktemp("stubs")
    stub = '#include "kernels.h"\nnamespace eesd {{ const Kernels {0}_kernels = {{"{0}", [] {{ return false; }}}}; }}\n'
    for name in ("avx512", "avx2"):
        (directory / f"{name}.cpp").write_text(stub.format(name))
        compile_all(
            ["g++", *FLAGS, "-fPIC", f"-I{SOURCES}", "-c", str(directory / f"{name}.cpp"), "-o", str(directory / f"{name}.o")]
        )
    return [str(directory / f"{name}.o") for name in ("avx512", "avx2")]


def build(sources: Path, library: Path, stubs: list[str]) -> Path:
    common = ["g++", *FLAGS, "-O1", "-fPIC", "-fvisibility=hidden"]
    objects = [str(library.with_name(f"{name}.o")) for name in ("kernels_scalar", "operators")]
    compile_all(*([*common, "-c", str(sources / f"{Path(to).stem}.cpp"), "-o", to] for to in objects))
    compile_all(["g++", "-shared", "-o", str(library), *objects, *stubs])
    return library


@pytest.fixture(autouse=True)
def give_back() -> object:
    yield
    operators._library.cache_clear()


@pytest.mark.parametrize("check", [check_products, check_split_scales, check_trees, check_chunks])
def test_the_sources_pass_the_checks(
    tmp_path: Path, stubs: list[str], monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], None]
) -> None:
    load(build(SOURCES, tmp_path / "own.so", stubs), monkeypatch)
    assert operators.fastest() == "scalar"
    check(tmp_path / "model")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(tmp_path: Path, stubs: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, old, new, check = MUTANTS[name]
    sources = shutil.copytree(SOURCES, tmp_path / "sources")
    text = (sources / file).read_text()
    assert text.count(old) >= 1, f"{file} no longer holds {old!r}: rewrite the mutation"
    (sources / file).write_text(text.replace(old, new))
    load(build(sources, tmp_path / "mutant.so", stubs), monkeypatch)
    with pytest.raises(AssertionError, match=r"have other bits"), np.errstate(all="ignore"):
        check(tmp_path / "model")
