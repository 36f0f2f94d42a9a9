"""The engine for GPUs gives the right tokens whenever the work in its streams is done
(support/fake_cuda.py)."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import fake_tensorrt, late_gpus
from support.command import slow_but
from support.device_tensors import on_devices
from support.fake_cuda import Machine, install
from support.late_gpus import PROMPTS, SETTINGS, Planned, Setting, late_llm, wrong
from support.mutants import then
from support.turns import TurnLock, Turns

import eesd
from eesd.runtime.compare import compare
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import cuda_graph, forward_step
from eesd.runtime.engines.device import DeviceStream
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.forward_step import ForwardStep

Mutation = Callable[[pytest.MonkeyPatch, Machine], object]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1000, 1010))]
)
@pytest.mark.parametrize("name", slow_but([*SETTINGS], *late_gpus.QUICK))
def test_tokens_do_not_depend_on_when_work_is_done(planned: Planned, name: str, first: int) -> None:
    """With a new LLM now and then, because work is captured once."""
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, first) as (machine, llm):
        assert wrong(planned(setting), machine, llm, range(first, first + 5)) == []


@pytest.mark.parametrize("name", slow_but(["chain", "chain by torch"], "chain"))
def test_a_comparison_also_has_plain_decoding_with_one_node(planned: Planned, name: str) -> None:
    """So that drafting is not compared only with what is padded for its sake."""
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, seed=0) as (_, llm):
        assert isinstance(llm.engines.verify, DeviceEngine)
        counts = []
        step = llm.engines.verify._step

        def noted(memory: Any, first: int, rows: int, count: int, *others: Any) -> Any:
            counts.append(count)
            return step(memory, first, rows, count, *others)

        llm.engines.verify._step = noted  # type: ignore[method-assign, assignment]
        found = compare(llm, PROMPTS[0], Sampling(), 12, ignore_eos=True)
        most = llm.manifest.max_tree_nodes + 1
        assert (
            found.divergence is None
            and found.one_node is not None
            and found.one_node.new_tokens == 12
        )
        assert counts.count(most) > 12 and counts.count(1) >= 12, "padded, and then one node a pass"
        assert llm.engines.verify.buckets[0] == most, "what serves requests is as before"


@pytest.mark.parametrize(
    "name", ["chain in 3 stages on 3 GPUs", "tree in 3 stages on 2 GPUs", "chain over few slots"]
)
def test_calls_at_the_end_of_the_cache_may_be_late_too(planned: Planned, name: str) -> None:
    """There the calls are not captured, and what they need is freed after each."""
    directory = planned(SETTINGS[name])
    setting = SETTINGS[name]
    prompt = PROMPTS[2]
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    expected = plain.generate(prompt, max_new_tokens=200, ignore_eos=True).tokens
    with late_llm(directory, setting, seed=0) as (machine, llm):
        for seed in range(3):
            machine.reseed(seed)
            assert llm.generate(prompt, max_new_tokens=200, ignore_eos=True).tokens == expected
    assert len(prompt) + len(expected) == 96


@pytest.mark.parametrize(
    "name", slow_but(["chain", "chain by torch", "chain in 3 stages on 3 GPUs"], "chain")
)
@pytest.mark.parametrize("pieces", [0, 5, 40])
def test_a_capture_that_fails_inside_costs_speed_and_no_token(
    planned: Planned, name: str, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The call runs without a graph, and so do those after it whose pool is lost."""
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, seed=0) as (machine, llm):
        machine.breaking = pieces
        assert wrong(planned(setting), machine, llm, range(3)) == []
    assert machine.breaking is None and "runs without a CUDA graph" in caplog.text


@pytest.mark.parametrize("name", ["chain", "tree in 3 stages on 3 GPUs without CUDA graphs"])
def test_sessions_side_by_side_do_not_disturb_each_other(planned: Planned, name: str) -> None:
    """They share streams and scratch memory."""
    directory = planned(SETTINGS[name])
    setting = SETTINGS[name]
    with late_llm(directory, setting, seed=0) as (machine, llm):
        for seed in range(3):
            machine.reseed(seed)
            with ExitStack() as stack:
                opened = [
                    llm.session(prompt, max_new_tokens=late_gpus.TOKENS, ignore_eos=True)
                    for prompt in PROMPTS
                ]
                sessions = [stack.enter_context(session) for session in opened]
                while unfinished := [
                    session for session in sessions if session.finish_reason is None
                ]:
                    machine.random.choice(unfinished).step()
            for number, (prompt, session) in enumerate(zip(PROMPTS, sessions, strict=True)):
                assert session.tokens[len(prompt) :] == late_gpus.expected(directory)[number, 0]


@pytest.mark.parametrize(
    "name", slow_but(["chain", "chain by torch", "tree in 3 stages on 2 GPUs by torch"], "chain")
)
def test_threads_with_a_model_each_do_not_disturb_each_other(
    planned: Planned, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They load, capture and generate in turns, each with its own streams. No capture fails."""
    for seed in range(3):
        in_two_threads(planned(SETTINGS[name]), SETTINGS[name], seed, locked=True)
    assert "CUDA graph" not in caplog.text


def test_captures_of_two_threads_at_once_are_noticed(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    """The mistake that the lock prevents: torch waits for the whole GPU before it captures. Not
    every order leads to it."""
    for seed in range(10):
        in_two_threads(planned(SETTINGS["chain"]), SETTINGS["chain"], seed, locked=False)
        if "runs without a CUDA graph" in caplog.text:
            return
    pytest.fail("nothing notices the mistake")


def in_two_threads(directory: Path, setting: Setting, seed: int, locked: bool) -> None:
    """Generate in two threads on one machine, in an order that the seed decides, and judge the
    tokens."""
    wanted = late_gpus.expected(directory)
    turns = Turns(seed)

    def generate() -> None:
        with on_devices(machine):
            llm = eesd.load(
                directory,
                "torch" if setting.flavour == "torch" else "tensorrt",
                speculation=setting.speculation,
            )
            for number, prompt in enumerate(PROMPTS):
                made = llm.generate(prompt, max_new_tokens=late_gpus.TOKENS, ignore_eos=True)
                assert made.tokens == wanted[number, 0]

    with pytest.MonkeyPatch.context() as patch, install(Machine(setting.devices, seed)) as machine:
        fake_tensorrt.install(patch)
        patch.setattr(cuda_graph, "_ONE_CAPTURE", TurnLock(turns) if locked else nullcontext())
        machine.turns = turns
        turns.run(generate, generate)
        machine.turns = None


def assert_caught(directory: Path, setting: Setting, mutate: Mutation) -> None:
    """A mistake in the runtime gives other tokens with one of 20 seeds, no token, or an engine that
    refuses its input."""
    with (
        late_llm(directory, setting, seed=0) as (machine, llm),
        pytest.MonkeyPatch.context() as patch,
    ):
        mutate(patch, machine)
        try:
            found = any(wrong(directory, machine, llm, range(seed, seed + 1)) for seed in range(20))
        except (RuntimeError, ValueError) as error:
            assert "out of data bounds" in str(error) or "float NaN" in str(error)
        else:
            assert found, "nothing notices the mistake"


def drop_waits_between_devices(_: pytest.MonkeyPatch, machine: Machine) -> None:
    machine.joins = False


def read_before_the_host_waited(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(DeviceStream, "synchronize", lambda _: None)


def run_engines_in_another_stream(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    others = [machine.new_stream(device) for device in range(machine.devices)]
    patch.setattr(
        DeviceStream, "handle", property(lambda self: others[self.device.index].cuda_stream)
    )


def move_slots_in_another_stream(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(RowMemory, "active_shards", lambda self: iter(self.shards))


def leave_caches_as_they_are(patch: pytest.MonkeyPatch, _: Machine) -> None:
    def empty(self: Any, shard: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.streams[shard].device)

    patch.setattr(RowMemory, "_zeros", empty)
    patch.setattr(RowMemory, "reset", lambda *_: None)


def free_what_a_prepared_call_reads(patch: pytest.MonkeyPatch, _: Machine) -> None:
    then(patch, forward_step._StageStep, "__init__", lambda step: delattr(step, "_rows"))


def move_inputs_after_the_capture(patch: pytest.MonkeyPatch, _: Machine) -> None:
    original = ForwardStep.set_inputs

    def set_inputs(self: Any, *args: Any) -> None:
        if self._stages[0]._graph._graph is not None:
            self._inputs = [forward_step.InputViews(*map(np.copy, views)) for views in self._inputs]
        original(self, *args)

    patch.setattr(ForwardStep, "set_inputs", set_inputs)


MISTAKES: dict[str, tuple[str, Mutation]] = {
    "no wait between devices": ("chain in 3 stages on 3 GPUs", drop_waits_between_devices),
    "no wait of the host": ("chain", read_before_the_host_waited),
    "engines in another stream": ("chain", run_engines_in_another_stream),
    "engines in another stream without CUDA graphs": (
        "tree in 3 stages on 3 GPUs without CUDA graphs",
        run_engines_in_another_stream,
    ),
    "slots moved in another stream": ("tree", move_slots_in_another_stream),
    "caches that are not zeroed": ("chain", leave_caches_as_they_are),
    "inputs that are freed": ("chain", free_what_a_prepared_call_reads),
    "inputs at another address": ("chain", move_inputs_after_the_capture),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(planned: Planned, name: str) -> None:
    setting, mutate = MISTAKES[name]
    assert_caught(planned(SETTINGS[setting]), SETTINGS[setting], mutate)
