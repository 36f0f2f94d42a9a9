"""Tests that run the operators' C++ code under sanitizers. Other tests make deliberate mistakes in
the code, which the checks of the operators must detect."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import specification
from support.delta_layer import check_rounds
from support.latent_layer import check_by_heads, check_latent
from support.operators import (
    Attention,
    Mixture,
    Product,
    assert_same,
    attend,
    check_float16,
    check_mixture,
    check_product,
    load,
    prefill,
    random_weight,
    top,
    tree,
)

from eesd.export.cpu.panels import NARROW, SPLIT
from eesd.runtime.engines import operators

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ for x86-64"
    ),
]

SOURCES = Path(operators.__file__).parents[1] / "operators"
CHECKS = Path(__file__).parent
FLAGS = ("-std=c++17", "-ffp-contract=off")
MISSING = ("-DEESD_MISSING",)
KERNELS = {
    "avx512": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mfma",
        "-mf16c",
    ),
    # This is the same instruction as in AVX-VNNI.
    "avx2vnni": ("-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "i8mm": MISSING,
    "neon": MISSING,
    "scalar": (),
}
ARM_COMPILER = "aarch64-linux-gnu-g++"
EMULATED = "5"
"""The emulator runs only every fifth case of the driver, because it is ten times slower."""
SIMDE = "simde/x86/avx512.h"
SETUP = SOURCES.resolve().parents[1]
"""The directory that contains setup.py. In the checkout, the package's folders are links."""
CROSS = """
import platform, sys, setuptools.command.bdist_wheel, setuptools.command.build_ext
from concurrent.futures import thread
from pathlib import Path
folder, root, sys.platform, machine = sys.argv[1:]
platform.machine, setuptools.setup = lambda: machine, lambda **_: None
sys.path.insert(0, root)
import setup
setup.make_library(Path(folder, "library"), Path(folder))
"""


def build_for(system: str, machine: str, compiler: str, folder: Path) -> None:
    """Build the library as the package does on this system and machine, without a warning."""
    command = [sys.executable, "-P", "-c", CROSS, str(folder), str(SETUP), system, machine]
    done = subprocess.run(
        command, cwd=SETUP, capture_output=True, text=True, env=os.environ | {"CXX": compiler}
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    assert (folder / "library").exists() and len(list(folder.glob("kernels_*.o"))) == len(KERNELS)


def compile_all(*commands: list[str]) -> None:
    """Run compilers in parallel."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    for process in running:
        output = process.communicate()[0]
        assert process.returncode == 0, output[-3000:]


def compiled(name: str, options: tuple[str, ...]) -> list[str]:
    """Returns the source and the compiler flags of kernels."""
    return [*FLAGS, *options, f"-DEESD_KERNELS={name}", "-c", str(SOURCES / "kernels.cpp")]


def sanitized(source: list[str], to: Path) -> list[str]:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return ["g++", "-O0", "-g1", *sanitizers, *source, "-o", str(to)]


def run_sanitized(objects: dict[str, Path], program: Path, cases: str) -> list[str]:
    """Link and run the driver. Returns the names of the kernels that ran."""
    compile_all(
        ["g++", "-fsanitize=address,undefined", *map(str, objects.values()), "-o", str(program)]
    )
    done = subprocess.run(
        [program, cases], capture_output=True, text=True, env={**os.environ, "ASAN_OPTIONS": ""}
    )
    assert done.returncode == 0 and done.stdout.startswith("equal bits"), (
        done.stdout[-2000:] + done.stderr[-4000:]
    )
    return done.stderr.split()


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The driver and the kernels, compiled with sanitizers."""
    scratch = tmp_path_factory.mktemp("sanitized")
    sources = {name: compiled(name, options) for name, options in KERNELS.items()}
    sources["driver"] = [*FLAGS, f"-I{SOURCES}", "-c", str(CHECKS / "check_kernels.cpp")]
    made = {name: scratch / f"{name}.o" for name in sources}
    compile_all(*(sanitized(source, made[name]) for name, source in sources.items()))
    return made


def test_sanitizers_find_nothing(objects: dict[str, Path], tmp_path: Path) -> None:
    """The driver runs products and attention of odd sizes, in memory of exactly their size. All
    kernels give the same bits."""
    assert "scalar" in run_sanitized(objects, tmp_path / "check", "1")


def test_emulated_instructions_give_the_same_bits(objects: dict[str, Path], tmp_path: Path) -> None:
    """The test runs the driver without AVX-512 and AVX-VNNI. SIMDe's AVX2 functions replace these
    instructions."""
    if "avx2" not in run_sanitized(objects, tmp_path / "own", "1000"):
        pytest.skip("needs a processor with AVX2")
    if subprocess.run(
        ["g++", "-E", "-include", SIMDE, "-x", "c++", os.devnull], capture_output=True
    ).returncode:
        pytest.skip("SIMDe missing: apt-get install libsimde-dev")
    options = (*KERNELS["avx2"], "-include", str(CHECKS / "emulated_avx512.h"))
    emulated = {name: tmp_path / f"{name}.o" for name in ("avx512", "avx2vnni")}
    compile_all(*(sanitized(compiled(name, options), to) for name, to in emulated.items()))
    assert set(emulated) < set(run_sanitized(objects | emulated, tmp_path / "check", EMULATED))


@pytest.fixture(scope="module")
def arm_check(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns the driver, which is built for ARM with the kernels of the package, and the output of
    the driver with the kernels of this machine."""
    lacking = [name for name in (ARM_COMPILER, "qemu-aarch64") if shutil.which(name) is None]
    if lacking:
        pytest.skip(
            f"{' and '.join(lacking)} missing: apt-get install g++-aarch64-linux-gnu qemu-user"
        )
    scratch = tmp_path_factory.mktemp("arm")
    build_for("linux", "aarch64", ARM_COMPILER, scratch)
    built = sorted(map(str, scratch.glob("kernels_*.o")))
    driver = str(CHECKS / "check_kernels.cpp")
    common = [*FLAGS, "-O1", f"-I{SOURCES}", driver, "-o"]
    objects = {name: str(scratch / f"own_{name}.o") for name in KERNELS}
    compile_all(
        [ARM_COMPILER, *common, str(scratch / "arm"), "-static", *built],
        *(
            ["g++", "-O1", *compiled(name, options), "-o", objects[name]]
            for name, options in KERNELS.items()
        ),
    )
    compile_all(["g++", *common, str(scratch / "own"), *objects.values()])
    return scratch / "arm", subprocess.run(
        [scratch / "own", EMULATED], capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    ("processor", "fastest"), [("max", "i8mm"), ("neoverse-n1", "neon"), ("cortex-a53", "scalar")]
)
def test_kernels_for_arm_give_the_same_bits(
    arm_check: tuple[Path, str], processor: str, fastest: str
) -> None:
    """One processor has matrix products, one has dot products, and one runs the kernels in plain
    C++."""
    program, expected = arm_check
    done = subprocess.run(
        ["qemu-aarch64", "-cpu", processor, program, EMULATED], capture_output=True, text=True
    )
    assert expected.startswith("equal bits") and done.stdout == expected, (
        done.stdout[-2000:] + done.stderr[-2000:]
    )
    assert done.stderr.split()[-1] == fastest


def check_products(path: Path) -> None:
    """Check products with float weights, and products with levels. The levels have a scale for each
    32 or 16 inputs, with and without minimums."""
    random = np.random.default_rng(0)
    for int8 in (True, False):
        for form, fine, minimums in (
            ("bits4", False, True),
            ("bits6", True, False),
            ("bits5", True, True),
            ("float16", False, False),
            ("planes", False, False),
            ("upper", False, False),
        ):
            weight = random_weight(random, form, 96, 33, fine, NARROW, minimums)
            norm = random.normal(1, 0.3, 96).astype(np.float32)
            check_product(Product([weight], norm), path, int8, ["scalar"], (1, 2))


def check_split_scales(path: Path) -> None:
    """Check scales and minimums that share a factor for each 256 inputs."""
    random = np.random.default_rng(0)
    for fine in (True, False):
        weight = random_weight(random, "bits4", 512, 33, fine, SPLIT, True)
        check_product(Product([weight]), path, True, ["scalar"], (1, 2))


def check_trees(path: Path) -> None:
    """Compare the nodes of a tree with the specification. The slot of each node differs from its
    place in the tree."""
    layer = Attention()
    text = layer.text(70, [69, 70, 70, 71, 71, 72, 75, 74])
    session = layer.session(layer.write(path), 1, "scalar")
    prefill(session, text, 70)
    assert_same(attend(session, tree(text, 70, 78, 90))[0], layer.specified(text, range(70, 78)))


def check_shared(path: Path) -> None:
    """Check a tree after a context of more than one chunk. The nodes of the tree read the chunks of
    the context together, in float16 and int8 caches."""
    for dtype in ("float16", "int8"):
        layer = Attention(dtype=dtype)
        text = layer.text(150, [149, 150, 150, 151, 151, 152])
        session = layer.session(layer.write(path), 1, "scalar")
        prefill(session, text, 150)
        assert_same(
            attend(session, tree(text, 150, 156, 170))[0], layer.specified(text, range(150, 156))
        )


def check_rounding(path: Path) -> None:
    """Check how values are rounded in float16 caches."""
    check_float16(path, ["scalar"])


def check_chunks(path: Path) -> None:
    """Compare a long text with the specification. The text runs in one call and token by token,
    with one thread and with two threads."""
    layer = Attention(norms=True)
    text = layer.text(300)
    some = [0, 62, 63, 64, 127, 128, 129, 255, 256, 299]
    expected = layer.specified(text, some)
    for threads in (1, 2):
        session = layer.session(layer.write(path), threads, "scalar")
        assert_same(prefill(session, text, 300)[some], expected)
        assert_same(prefill(session, text, 300, (60, 1))[some], expected)


def check_top(path: Path) -> None:
    """Logits with ties."""
    logits = np.rint(np.random.default_rng(0).normal(0, 3, (4, 500))).astype(np.float32)
    logits[0, 3] = np.nan
    logits[1, -1] = 30
    columns, logprobs = specification.top_k(logits, 6)
    found = top(path, 6, kernels="scalar").run(None, {"logits": logits})
    assert_same(found[0].astype(np.float32), columns.astype(np.float32), "columns")
    assert_same(found[1], logprobs, "log-probabilities")


def check_experts(path: Path) -> None:
    """Check two mixtures of a few experts. In one, the weights are divided by their sum. In the
    other, they are multiplied by factors instead."""
    random = np.random.default_rng(0)
    for form, used, normed in (("float32", 2, True), ("bits4", 3, False)):
        own = [
            [random_weight(random, form, 32, 32, False, NARROW, True) for _ in range(3)]
            for _ in range(5)
        ]
        factors = None if normed else random.normal(0, 1, 5).astype(np.float32)
        mixture = Mixture(own, used, normed, residual=True, factors=factors)
        check_mixture(mixture, path, True, ["scalar"])


def check_choice(path: Path) -> None:
    """Check the routers that choose experts by scores with biases and groups, and by the logits
    near the largest."""
    random = np.random.default_rng(1)
    experts = [
        [random_weight(random, "float32", 16, 16, False, NARROW, True) for _ in range(3)]
        for _ in range(8)
    ]
    bias = random.normal(0, 0.5, 8).astype(np.float32)
    for choice in (
        specification.Choice(1, bias, 4, 2, 2, 1e-2, 2.5),
        specification.Choice(0, bias, 4, 2, 2),
        specification.Choice(2, np.zeros(0, np.float32), margin=0.3),
    ):
        check_mixture(
            Mixture(experts, 3, choice.scores == 1, choice=choice), path, True, ["scalar"]
        )


def check_rows(path: Path) -> None:
    """Check latent attention over a text and over a tree, and the products by heads."""
    check_latent(path, ["scalar"])
    check_by_heads(path, ["scalar"])


def check_delta(path: Path) -> None:
    """Check the operator in draft and verify calls, with chains, trees and rejected tokens."""
    check_rounds(path / "rule", (2, 4, 20, 17, 3), space=False)
    check_rounds(path / "space", (2, 4, 20, 17, 3), space=True)


MUTANTS: dict[str, tuple[str, str, str, Callable[[Path], None]]] = {
    "wrong ancestor": (
        "attention.h",
        "token.path[place - token.context]",
        "token.path[0]",
        check_trees,
    ),
    "next ancestor": (
        "attention.h",
        "token.path[place - token.context]",
        "token.path[least(place - token.context + 1, token.path_length - 1)]",
        check_trees,
    ),
    "stale slot": (
        "attention.h",
        "? token.context : first; place",
        "? token.context + 1 : first; place",
        check_trees,
    ),
    "tile behind the context": (
        "attention.h",
        "first + 16 <= token.context",
        "first <= token.context",
        check_trees,
    ),
    "key in another slot": (
        "attention.h",
        "return key_at<Cell>(slot, d)",
        "return key_at<Cell>(slot + 1, d)",
        check_trees,
    ),
    "value of a stale slot": (
        "attention.h",
        "value_at<Cell>(slot, d, width)",
        "value_at<Cell>(place, d, width)",
        check_trees,
    ),
    "split one chunk short": (
        "operators.cpp",
        "split ? share + 1 : chunks",
        "split ? share + 1 : chunks - 1",
        check_chunks,
    ),
    "split one chunk late": (
        "operators.cpp",
        "split ? share : 0",
        "split ? share : 1",
        check_chunks,
    ),
    "part of the work left out": (
        "session.h",
        "(at + 1) / own.parts",
        "(at + 1) / own.parts - at",
        check_products,
    ),
    "wrong merge order": (
        "attention.h",
        "for (int64_t c = 1; c < chunks; c++) merge(part, job.part(t, h, c), job.width);",
        "for (int64_t c = chunks - 1; c > 0; c--) merge(part, job.part(t, h, c), job.width);",
        check_chunks,
    ),
    "sum not scaled in a merge": (
        "attention.h",
        "fma(all(part[1]), old_factor,",
        "fma(all(part[1]), all(1.f),",
        check_chunks,
    ),
    "one position too few": (
        "attention.h",
        "least(seen, CHUNK), part}",
        "least(seen > 1 ? seen - 1 : 1, CHUNK), part}",
        check_chunks,
    ),
    "a path's chunk shared": (
        "attention.h",
        "context >= (chunk + 1) * CHUNK",
        "context >= chunk * CHUNK",
        check_shared,
    ),
    "scale of another key": (
        "attention.h",
        "scales_of(keys, width)[slot",
        "scales_of(keys, width)[place",
        check_shared,
    ),
    "scale of another value": (
        "attention.h",
        "scales_of(values, width)[slot",
        "scales_of(values, width)[place",
        check_shared,
    ),
    "scales of absent places": (
        "attention.h",
        "query.first, query.seen, 0);",
        "query.first, CHUNK, 0);",
        check_shared,
    ),
    "float16 cut off": (
        "kernels.h",
        "0x38000000 + 0xfff + (bits >> 13 & 1)",
        "0x38000000",
        check_shared,
    ),
    "float16 ties up": ("kernels.h", "0xfff + (bits >> 13 & 1)", "0x1000", check_rounding),
    "float16 infinite": (
        "kernels.h",
        "if (bits > 0x477fe000)",
        "if (bits > 0x7f800000)",
        check_rounding,
    ),
    "float16 without subnormal numbers": (
        "kernels.h",
        "size += 0.5f",
        "size = 0.5f",
        check_rounding,
    ),
    "dropped scale of activations": (
        "integers.h",
        ", all(a.scales[block]))",
        ", all(1.f))",
        check_products,
    ),
    "dropped scale of weights": (
        "products.h",
        "odd[m]), scale, sum[m])",
        "odd[m]), all(1.f), sum[m])",
        check_products,
    ),
    "dropped minimum": ("integers.h", "if (minimums) sum[m]", "if (false) sum[m]", check_products),
    "dropped minimum, float32": (
        "products.h",
        "if (w.minimums) sum[m]",
        "if (false) sum[m]",
        check_products,
    ),
    "dropped zero": ("integers.h", "-w.zero * a.sums[fine][part]", "0", check_products),
    "dropped zero, float32": ("products.h", "all((float)w.zero)", "all(0)", check_products),
    "half of another block": (
        "integers.h",
        "load_scales(w, scales, h,",
        "load_scales(w, scales, 0,",
        check_products,
    ),
    "half of another block, float32": (
        "products.h",
        "load_scales(w, scales, h,",
        "load_scales(w, scales, 0,",
        check_products,
    ),
    "factors of another scale": (
        "kernels.h",
        "block / SUPER * (SUPER",
        "0 * (SUPER",
        check_split_scales,
    ),
    "factors of scales for minimums": (
        "levels.h",
        "factors + PANEL * 2",
        "factors",
        check_split_scales,
    ),
    "dropped factor": (
        "levels.h",
        "mul(load_int8((const int8_t *)p + index * PANEL), ",
        "(",
        check_split_scales,
    ),
    "the later one of equal logits": (
        "topk.h",
        "values[at - 1] < value",
        "values[at - 1] <= value",
        check_top,
    ),
    "a strip passed over": (
        "topk.h",
        "if (!(largest_lane(most) >",
        "if (first > 100 || !(largest_lane(most) >",
        check_top,
    ),
    "NaN as a number": ("topk.h", "x[i] == x[i] ? x[i] : -INFINITY", "x[i]", check_top),
    "last columns not added": ("topk.h", "if (i < job.columns) sum", "if (false) sum", check_top),
    "experts in the order of their weights": (
        "operators.cpp",
        "own[a] < own[b]",
        "a < b",
        check_experts,
    ),
    "weights of other experts": (
        "operators.cpp",
        "weights[t * used_ + one]",
        "weights[t * used_ + i]",
        check_experts,
    ),
    "activations of another expert": (
        "operators.cpp",
        "ready.from(first)",
        "ready.from(0)",
        check_experts,
    ),
    "weights not divided": ("experts.h", "job.normed && i < k", "false", check_experts),
    "weights without factors": ("experts.h", "job.factors && i < k", "false", check_experts),
    "factors of other experts": ("experts.h", "[job.top.found[row * k + i]]", "[i]", check_experts),
    "scores that fall with the logits": (
        "experts.h",
        "add(all(1.f), exponential(sub(all(0), x)))",
        "add(all(1.f), exponential(x))",
        check_choice,
    ),
    "scores without biases": (
        "experts.h",
        "job.bias ? scores[i] + job.bias[i] : scores[i]",
        "scores[i]",
        check_choice,
    ),
    "biases in the weights": (
        "experts.h",
        "weights[i] = scores[found[i]]",
        "weights[i] = ranks[found[i]]",
        check_choice,
    ),
    "groups ranked by one score": (
        "experts.h",
        "i < job.group_best; i++) sums",
        "i < 1; i++) sums",
        check_choice,
    ),
    "a group too few": (
        "experts.h",
        "i < job.used_groups; i++",
        "i + 1 < job.used_groups; i++",
        check_choice,
    ),
    "experts of all groups": (
        "experts.h",
        "!used && i <",
        "false && i <",
        check_choice,
    ),
    "weights divided by their bare sum": (
        "experts.h",
        "sum += job.epsilon;",
        "",
        check_choice,
    ),
    "weights without their scale": (
        "experts.h",
        "weights[i] *= job.scale",
        "weights[i] *= 1",
        check_choice,
    ),
    "a share that counts earlier experts": (
        "experts.h",
        "counts &= found[before] != i + j",
        "counts &= true",
        check_choice,
    ),
    "a margin of the logit alone": (
        "experts.h",
        "(absolute > most ? absolute : most)",
        "absolute",
        check_choice,
    ),
    "sum of the experts rounded twice": (
        "experts.h",
        (
            "sum = fma(all(job.weights[i]), load_some(job.experts + job.rows[i] * job.columns + "
            "column, count), sum)"
        ),
        (
            "sum = add(mul(all(job.weights[i]), load_some(job.experts + job.rows[i] * job.columns "
            "+ column, count)), sum)"
        ),
        check_experts,
    ),
    "lower halves as the upper ones": (
        "vector_scalar.h",
        "(low.byte[i] & 15)",
        "(high.byte[i] & 15)",
        check_products,
    ),
    "lower halves of another block": (
        "levels.h",
        "panel[2] + block * HALF",
        "panel[2]",
        check_products,
    ),
    "lower plane of another panel": (
        "products.h",
        "lower_at(panels[i])",
        "lower_at(0)",
        check_products,
    ),
    "upper halves without what they lack": (
        "levels.h",
        "7.5f - (float)w.zero",
        "-(float)w.zero",
        check_products,
    ),
    "keys not divided by their length": (
        "delta.h",
        "make_unit(convolved + keys + at, 1.f",
        "make_unit(convolved + keys + at, 2.f",
        check_delta,
    ),
    "taps in another order": (
        "delta.h",
        "(job.taps - 1 - distance) * mixed",
        "distance * mixed",
        check_delta,
    ),
    "softplus without its correction": (
        "delta.h",
        "logarithm(sum) * lane[0] / (sum - 1.f)",
        "logarithm(sum)",
        check_delta,
    ),
    "values that the state does not know": (
        "delta.h",
        "mul(sub(delta[c], sum[c]), rate)",
        "mul(delta[c], rate)",
        check_delta,
    ),
    "decay after the step": (
        "delta.h",
        "fma(all(key[k]), delta[c], mul(load(from + at), decay))",
        "mul(fma(all(key[k]), delta[c], load(from + at)), decay)",
        check_delta,
    ),
    "a key of another group": (
        "delta.h",
        "head / (job.value_heads / job.key_heads)",
        "head % job.key_heads",
        check_delta,
    ),
    "a state space without biases": (
        "delta.h",
        "job.taps_bias ? load_some(job.taps_bias + i, count) : all(0)",
        "all(0)",
        check_delta,
    ),
    "values of a state space without steps": (
        "delta.h",
        "values[j] * size",
        "values[j]",
        check_delta,
    ),
    "a factor of another head": ("delta.h", "job.skip[head]", "job.skip[0]", check_delta),
    "a state of rejected tokens": (
        "operators.cpp",
        "if (after[which] < 0 || after[which] > run.slot) after[which] = 0;",
        "if (after[which] < 0) after[which] = 0;",
        check_delta,
    ),
    "a state after another slot": (
        "operators.cpp",
        "if (chain) header->after[target] = slot + count;",
        "if (chain) header->after[target] = slot + count - 1;",
        check_delta,
    ),
    "a tree without its path": (
        "operators.cpp",
        "for (int64_t slot : start.more) step(-1, slot, 1, own);",
        "",
        check_delta,
    ),
    "a convolution of slots, not of paths": (
        "operators.cpp",
        "earlier[t * before + d] = record(run, slot);",
        "earlier[t * before + d] = record(run, std::max<int64_t>(run.slot + i - d - 1, 0));",
        check_delta,
    ),
    "values from another place of a row": (
        "attention.h",
        "rows[key_at<Cell>(i, d)]",
        "rows[key_at<Cell>(i, d + 1)]",
        check_rows,
    ),
    "values before the path is copied": (
        "attention.h",
        "values_of(tiles->keys[i],",
        "values_of(keys + first / 16 * size,",
        check_rows,
    ),
    "a rotated part of another head": (
        "attention.h",
        "x + job.heads * job.rank + h * rotated",
        "x + job.heads * job.rank",
        check_rows,
    ),
    "rows of another head's product": (
        "operators.cpp",
        "ready.from(h * tokens)",
        "ready.from(h)",
        check_rows,
    ),
    "norm without epsilon": ("rows.h", "(float)size + epsilon", "(float)size", check_products),
}
"""Each name has a file, the text to replace, the new text, and the check that must fail."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Mutants are compiled without the packer. Stubs replace the fast kernels, and report that no
    processor supports them."""
    directory = tmp_path_factory.mktemp("stubs")
    made = {name: str(directory / f"{name}.o") for name in operators.KERNELS if name != "scalar"}
    commands = [["g++", "-fPIC", *compiled(name, MISSING), "-o", to] for name, to in made.items()]
    made["pack"] = str(directory / "pack.o")
    commands.append(["g++", "-fPIC", *FLAGS, "-c", str(SOURCES / "pack.cpp"), "-o", made["pack"]])
    compile_all(*commands)
    return [*made.values()]


def build(sources: Path, library: Path, stubs: list[str]) -> Path:
    # Compiling takes most of the time.
    common = ["g++", *FLAGS, "-O0", "-fPIC", "-fvisibility=hidden", "-DEESD_KERNELS=scalar"]
    objects = [str(library.with_name(f"{name}.o")) for name in ("kernels", "operators")]
    compile_all(
        *([*common, "-c", str(sources / f"{Path(to).stem}.cpp"), "-o", to] for to in objects)
    )
    compile_all(["g++", "-shared", "-pthread", "-o", str(library), *objects, *stubs])
    return library


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, stubs: list[str]) -> Path:
    """The library of the unchanged sources."""
    return build(SOURCES, tmp_path_factory.mktemp("own") / "own.so", stubs)


@pytest.fixture(autouse=True)
def give_back() -> object:
    yield
    operators._library.cache_clear()


@pytest.mark.parametrize("check", dict.fromkeys(check for *_, check in MUTANTS.values()))
def test_the_sources_pass_the_checks(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], None]
) -> None:
    load(own, monkeypatch)
    assert operators.fastest() == "scalar"
    check(tmp_path / "model")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    tmp_path: Path, stubs: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file, old, new, check = MUTANTS[name]
    sources = shutil.copytree(SOURCES, tmp_path / "sources")
    text = (sources / file).read_text()
    assert text.count(old) >= 1, f"{file} no longer holds {old!r}: rewrite the mutation"
    (sources / file).write_text(text.replace(old, new))
    load(build(sources, tmp_path / "mutant.so", stubs), monkeypatch)
    with pytest.raises(AssertionError, match=r"have other bits"), np.errstate(all="ignore"):
        check(tmp_path / "model")
