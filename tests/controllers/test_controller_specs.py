"""Tests that any value of ``--controller`` either gives a controller or raises an error of one
sentence."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd.common.errors import EESDError
from eesd.controllers import CONTROLLERS, Controller, DraftStep, make_controller

pytestmark = pytest.mark.fast

NAMES = st.sampled_from(sorted(CONTROLLERS))
KEYS = sorted({key for kind in CONTROLLERS.values() for key in inspect.signature(kind).parameters})
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "1e999", "9" * 5000, "1_0", " 4 ", "٣", "0x4"]),
    st.text(),
)
OPTIONS = st.lists(
    st.tuples(st.one_of(st.sampled_from(KEYS), st.text()), VALUES).map("=".join)
).map(",".join)
SPECS = st.one_of(st.text(), st.tuples(NAMES, st.one_of(OPTIONS, st.text())).map(":".join))


@settings(max_examples=1000, deadline=None, database=None, derandomize=True)
@given(SPECS)
def test_any_text_is_a_controller_or_one_sentence(spec: str) -> None:
    try:
        controller = make_controller(spec)
    except EESDError as error:
        assert str(error).endswith(".")
        return
    assert isinstance(controller, Controller)
    controller.begin_round(1)
    controller.keep_drafting(DraftStep(1, 0.5, 0.5, 1.0, 1))


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("rest", [":", ":,", "::", ":=", ": "])
def test_empty_options_are_refused(name: str, rest: str) -> None:
    with pytest.raises(EESDError, match="has no option"):
        make_controller(name + rest)


@pytest.mark.parametrize(
    "spec", ["fixed:k=4,k=5", "fixed:k=4,k=4", "beta-ts:alpha=1,beta=1,alpha=2"]
)
def test_an_option_given_twice_is_refused(spec: str) -> None:
    with pytest.raises(EESDError, match=r"has the option (k|alpha) twice; give it once\.$"):
        make_controller(spec)


@pytest.mark.parametrize("spec", ["fixed:k=4,", "fixed:,k=4"])
def test_an_empty_option_beside_others_is_refused(spec: str) -> None:
    with pytest.raises(EESDError, match="has no option ''"):
        make_controller(spec)
