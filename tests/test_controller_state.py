"""``--controller-state``: a process starts with what the last one learned, or says why it cannot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import assert_refused, run, succeed

import eesd
from eesd.common.errors import EESDError
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.cli import main
from eesd.runtime.controller_state import load_controller_state, save_controller_state
from eesd.runtime.llm import LLM, Speculation

SPECULATIONS = [
    Speculation("cost-aware-ts", tree_budget=True),
    Speculation("beta-ts", tree_width=2),
    Speculation("ucb:longest=4"),
    Speculation("fixed:k=2"),
    Speculation("threshold", drafter="exit"),
]


def opened(engine: Path, speculation: Speculation) -> LLM:
    return eesd.load(engine, speculation=speculation, threads=1)


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda s: s.controller)
def test_a_new_process_continues_from_the_saved_state(engine: Path, tmp_path: Path, speculation: Speculation) -> None:
    first, file = opened(engine, speculation), tmp_path / "state.json"
    for seed in range(4):
        first.generate([5, 6, 7 + seed], max_new_tokens=60, ignore_eos=True)
    save_controller_state(first, file)
    second = opened(engine, speculation)
    load_controller_state(second, file)
    assert first.controller and second.controller and second.controller.state() == first.controller.state()
    assert second.value.state() == first.value.state() and second.value.rounds > 0
    assert isinstance(second.budget, TreeBudget) == speculation.tree_budget
    if first.budget and second.budget:
        assert second.budget.state() == first.budget.state() and second.budget.rounds > 0
    plain = opened(engine, speculation).generate([9, 9, 9], max_new_tokens=30, draft=False)
    assert second.generate([9, 9, 9], max_new_tokens=30).tokens == plain.tokens


def test_the_command_saves_and_continues(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    options = ("--engine-dir", engine, "-p", "hello", "-n", 40, "--ignore-eos", "--controller-state", file)
    rounds = []
    for _ in range(3):
        succeed(main, *options)
        rounds.append(json.loads(file.read_text())["state"]["value"]["rounds"])
    assert 0 < rounds[0] < rounds[1] < rounds[2]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_state_learned_otherwise_is_refused(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    save_controller_state(opened(engine, Speculation("beta-ts")), file)
    base = ("--engine-dir", engine, "-p", "hello", "--controller-state", file)
    assert_refused(run(main, *base), "learned with controller 'beta-ts'", "another --controller-state")
    assert_refused(run(main, *base, "--controller", "beta-ts", "--tree-width", 2), "learned with tree_width 1")
    assert_refused(run(main, *base, "--controller", "beta-ts", "--tree-budget"), "learned with tree_budget False")
    assert_refused(run(main, *base, "--no-draft"), "--controller-state needs drafting")
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"model": "another"}))
    assert_refused(run(main, *base, "--controller", "beta-ts"), "learned with model 'another'")
    assert json.loads(file.read_text())["model"] == "another", "a refused file is left as it was"


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format": 1}', "\ufeff{}"])
def test_a_damaged_file_is_refused(engine: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "state.json"
    file.write_text(text)
    assert_refused(run(main, "--engine-dir", engine, "-p", "hello", "--controller-state", file), "state.json")
    assert file.read_text() == text


JSON_VALUES = st.recursive(
    st.sampled_from([0, -1, 1e-320, 1e308, -1e308, 10**400, 0.5, 10**8])
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@pytest.fixture(scope="module")
def learned(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    llm, file = opened(engine, SPECULATIONS[0]), tmp_path_factory.mktemp("learned") / "state.json"
    llm.generate([5, 6, 7], max_new_tokens=100, ignore_eos=True)
    save_controller_state(llm, file)
    return file


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_any_value_anywhere_is_restored_or_refused(engine: Path, learned: Path, data: st.DataObject) -> None:
    """Whatever stands in the file: an :class:`EESDError`, or a controller that generates the right tokens."""
    saved = json.loads(learned.read_text())
    path: tuple[Any, ...] = ("state", *data.draw(st.sampled_from(places(saved["state"])[1:])))
    *keys, last = path
    target = saved
    for key in keys:
        target = target[key]
    target[last] = data.draw(JSON_VALUES)
    file = learned.with_name("changed.json")
    file.write_text(json.dumps(saved))
    llm = opened(engine, SPECULATIONS[0])
    try:
        load_controller_state(llm, file)
    except EESDError:
        return
    expected = llm.generate([5, 6, 7], max_new_tokens=20, draft=False, ignore_eos=True).tokens
    with np.errstate(all="ignore"):
        assert llm.generate([5, 6, 7], max_new_tokens=20, ignore_eos=True).tokens == expected
