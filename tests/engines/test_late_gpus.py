"""Tests of the engine for GPUs on a fake machine (support/fake_cuda.py). The tokens do not depend
on when the work in its streams is done. The calls follow the rules of TensorRT and CUDA
(support/call_rules.py)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import fake_tensorrt, late_gpus
from support.call_rules import Figures, figures, violations
from support.command import slow_but
from support.device_tensors import on_devices
from support.fake_cuda import Machine, install
from support.late_gpus import PROMPTS, QUICK, SETTINGS, Planned, Setting, late_llm, wrong
from support.mutants import mutate, then
from support.on_cache import OnCache
from support.turns import TurnLock, Turns

import eesd
from eesd.common.manifest import load_manifest
from eesd.controllers.calibration import CostAwareTS
from eesd.runtime.compare import compare
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.embed import embed
from eesd.runtime.engines import cuda_graph, forward_step
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device import DeviceStream
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.draft_loop import DraftLoop
from eesd.runtime.engines.forward_step import ForwardStep, _StageStep
from eesd.runtime.engines.trt_engine import TrtStageRunner
from eesd.runtime.llm import LLM, Speculation

Mutation = Callable[[pytest.MonkeyPatch, Machine], object]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1000, 1010))]
)
@pytest.mark.parametrize("name", slow_but([*SETTINGS], *late_gpus.QUICK))
def test_tokens_do_not_depend_on_when_work_is_done(planned: Planned, name: str, first: int) -> None:
    """There is a new LLM for each ``first`` seed, because an LLM captures work only once."""
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, first) as (machine, llm):
        assert wrong(planned(setting), machine, llm, range(first, first + 5)) == []


@pytest.mark.parametrize("name", slow_but(["chain", "chain by torch"], "chain"))
def test_a_comparison_also_has_plain_decoding_with_one_node(planned: Planned, name: str) -> None:
    """If plain decoding never ran with one node, drafting would be compared only with plain
    decoding that is also padded."""
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
        assert llm.engines.verify.buckets[0] == most, "the engine that serves requests is unchanged"


@pytest.mark.parametrize(
    "name", ["chain in 3 stages on 3 GPUs", "tree in 3 stages on 2 GPUs", "chain over few slots"]
)
def test_calls_at_the_end_of_the_cache_may_be_late_too(planned: Planned, name: str) -> None:
    """At the end of the cache, calls are not captured, and their memory is freed after each
    call."""
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
    """The call runs without a CUDA graph. If the graphs' memory pool is lost, later calls run
    without a graph too."""
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, seed=0) as (machine, llm):
        machine.breaking = pieces
        assert wrong(planned(setting), machine, llm, range(3)) == []
    assert machine.breaking is None and "runs without a CUDA graph" in caplog.text


@pytest.mark.parametrize("name", ["chain", "tree in 3 stages on 3 GPUs without CUDA graphs"])
def test_sessions_side_by_side_do_not_disturb_each_other(planned: Planned, name: str) -> None:
    """The sessions share streams and scratch memory."""
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
    """The threads load, capture and generate in turns, each with separate streams. No capture
    fails."""
    for seed in range(3):
        in_two_threads(planned(SETTINGS[name]), SETTINGS[name], seed, locked=True)
    assert "CUDA graph" not in caplog.text


def test_captures_of_two_threads_at_once_are_noticed(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a capture, torch waits for the whole GPU. The lock therefore prevents captures of two
    threads at once. Not every order of the work leads to the mistake."""
    for seed in range(10):
        in_two_threads(planned(SETTINGS["chain"]), SETTINGS["chain"], seed, locked=False)
        if "runs without a CUDA graph" in caplog.text:
            return
    pytest.fail("nothing notices the mistake")


def in_two_threads(directory: Path, setting: Setting, seed: int, locked: bool) -> None:
    """Generate in two threads on one machine, in an order that the seed determines, and check the
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
    """A mistake changes the tokens with one of 20 seeds, or makes an engine refuse its input."""
    chosen, mutate = MISTAKES[name]
    setting = SETTINGS[chosen]
    directory = planned(setting)
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


PENALTY = Sampling(repetition_penalty=1.3)
CHAIN = SETTINGS["chain"]
STAGED = SETTINGS["chain in 3 stages on 3 GPUs"]


def generate(llm: LLM) -> None:
    for prompt in PROMPTS[:2]:
        llm.generate(prompt, max_new_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", slow_but([*SETTINGS], *QUICK))
def test_calls_keep_the_rules(planned: Planned, name: str) -> None:
    setting = SETTINGS[name]
    with late_llm(planned(setting), setting, seed=1) as (machine, llm):
        generate(llm)
        assert violations(machine) == []
        names = {(call.name, call.capturing) for call in machine.log}
        if setting.flavour == "torch":  # torch launches its kernels itself
            assert ("replay" in {name for name, _ in names}) == setting.cuda_graphs
        else:
            assert (
                ("execute", True) in names if setting.cuda_graphs else ("execute", False) in names
            )


def round_figures(
    directory: Path, setting: Setting, sampling: Sampling | None = None, on_device: bool = True
) -> list[Figures]:
    """Returns the figures of each round. The first rounds, which prepare calls, are left out."""
    found = []
    with late_llm(directory, setting, seed=1) as (machine, llm):
        llm.engines.verify.chooses = llm.engines.draft.chooses = on_device  # type: ignore[misc, union-attr]
        with llm.session(PROMPTS[1], sampling, max_new_tokens=40, ignore_eos=True) as session:
            for _ in range(8):
                machine.log.clear()
                session.step()
                found.append(figures(machine.log))
    return found[3:]


def test_a_round_of_a_chain_waits_twice(planned: Planned) -> None:
    """The host waits once for the chain of four steps, and once for the verify pass."""
    speculation = Speculation("fixed:k=4", guard=False, drafter="exit")
    one, three = (Setting(stages, stages, speculation) for stages in (1, 3))
    assert set(round_figures(planned(CHAIN), one)) == {Figures(waits=2, replays=4 + 1, executes=0)}
    assert set(round_figures(planned(STAGED), three)) == {
        Figures(waits=2, replays=4 + 3, executes=0)
    }
    without_graphs = replace(one, cuda_graphs=False)
    assert set(round_figures(planned(CHAIN), without_graphs)) == {
        Figures(waits=2, replays=0, executes=4 + 1)
    }


@pytest.mark.parametrize("sampling", [Sampling(), PENALTY], ids=["greedy", "penalty"])
def test_the_default_controller_waits_once_for_each_call(
    planned: Planned, sampling: Sampling
) -> None:
    """The controller decides on the host after each draft step. In a chain with greedy decoding, it
    decides after every two steps, which run as one call."""
    found = round_figures(
        planned(CHAIN), Setting(1, 1, Speculation(guard=False, drafter="exit")), sampling
    )
    steps = 1 if sampling is PENALTY else CostAwareTS.steps_at_once
    assert (
        all(one.replays == steps * (one.waits - 1) + 1 for one in found)
        and max(one.waits for one in found) > 1
    )


@pytest.mark.parametrize(("on_device", "waits"), [(True, 4 + 1), (False, 2 * (4 + 1))])
def test_a_round_with_a_penalty_waits_once_for_each_call(
    planned: Planned, on_device: bool, waits: int
) -> None:
    """If the host chooses, it also waits for the logits of each call."""
    setting = Setting(1, 1, Speculation("fixed:k=4", guard=False, drafter="exit"))
    found = round_figures(planned(CHAIN), setting, PENALTY, on_device)
    assert set(found) == {Figures(waits=waits, replays=4 + 1, executes=0)}


@pytest.mark.parametrize("sampling", [Sampling(), PENALTY])
def test_logits_of_a_tree_stay_on_the_device(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """The logits stay on the device even if each node of a level is drafted in a separate call.
    Such a call overwrites the logits of the previous call."""
    tree = SETTINGS["tree"]
    monkeypatch.setattr(
        forward_step, "fetch", lambda *_: pytest.fail("logits were copied to the host")
    )
    with late_llm(planned(tree), tree, seed=1) as (_, llm):
        llm.generate(PROMPTS[1], sampling, max_new_tokens=12, ignore_eos=True)


@contextmanager
def embedded(directory: Path) -> Iterator[tuple[Machine, LLM]]:
    """Yields a machine and an LLM that is embedded in a service. The GPU of the LLM is not the
    first, its memory holds garbage, and no device is current."""
    manifest = load_manifest(directory)
    geometry = manifest.geometry
    shape = (
        len(manifest.verify[0].caches),
        2,
        1,
        geometry.num_kv_heads,
        manifest.gpu_slots,
        geometry.head_dim,
    )
    with install(Machine(devices=2, seed=3)) as machine:
        stream = machine.new_stream(1)
        with machine.activate(stream):
            host = fake_tensorrt.host_of(directory, stream)
            memory = torch.empty(shape, device=torch.device("cuda", 1))
        yield (
            machine,
            embed(
                directory,
                replace(host, kv_cache=[memory], scratch=None),
                Speculation("fixed:k=4", guard=False),
            ),
        )


def test_an_embedded_llm_keeps_the_rules_on_any_gpu(planned: Planned) -> None:
    with embedded(planned(CHAIN)) as (machine, llm):
        assert late_gpus.wrong(planned(CHAIN), machine, llm, range(6)) == []
        assert violations(machine) == []


def tokens_while_other_streams_are_late(directory: Path) -> list[int]:
    """Returns the tokens of an embedded LLM if the other streams run nothing before the second
    round. A capture would wait for all streams."""
    with embedded(directory) as (machine, llm):
        llm.engines.verify.cuda_graphs = llm.engines.draft.cuda_graphs = False  # type: ignore[attr-defined, union-attr]
        machine.eagerness = 0
        machine.loyalty = 1
        with llm.session(PROMPTS[1], max_new_tokens=late_gpus.TOKENS, ignore_eos=True) as session:
            session.step()
            machine.eagerness = 0.8
            machine.loyalty = 0
            while session.finish_reason is None:
                session.step()
        return session.tokens[len(PROMPTS[1]) :]


def test_lent_memory_is_zeroed_in_the_streams_of_its_cache(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = planned(CHAIN)
    expected = late_gpus.expected(directory)[1, 0]
    assert tokens_while_other_streams_are_late(directory) == expected
    mutate(monkeypatch, RowMemory, "_checked", "stream.activate(), ", "")
    assert tokens_while_other_streams_are_late(directory) != expected, "nothing notices the mistake"


def preparing_changes_the_cache(directory: Path) -> bool:
    """Returns whether preparing the engines, with captured calls, changes caches that the verify
    engine has filled."""
    with late_llm(directory, CHAIN, seed=1) as (_, llm):
        verify = llm.engines.verify
        draft = llm.engines.draft
        assert draft is not None
        kv_cache = verify.new_kv_caches()[0]
        OnCache(verify, kv_cache).prefill(PROMPTS[1], 0)
        before = kv_cache.values(0, llm.manifest.max_seq_len)
        verify.prepare([kv_cache])
        draft.prepare([kv_cache])
        return not np.array_equal(kv_cache.values(0, llm.manifest.max_seq_len), before)


def test_preparing_leaves_the_cache_as_it_is(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not preparing_changes_the_cache(planned(CHAIN))
    again = (
        "self._device_inputs.copy_(self._host_inputs, non_blocking=True)  # capture() ran a step"
    )
    mutate(monkeypatch, DraftLoop, "run", again, "pass")
    assert preparing_changes_the_cache(planned(CHAIN)), "nothing notices the mistake"


def make_contexts_elsewhere(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    original = TrtStageRunner.prepare
    stream = machine.new_stream(0)

    def prepare(self: Any, inputs: Any) -> Any:
        with machine.activate(stream):
            return original(self, inputs)

    patch.setattr(TrtStageRunner, "prepare", prepare)


def capture_at_once(patch: pytest.MonkeyPatch, _: Machine) -> None:
    original = CapturedGraph.capture

    def capture(self: Any, work: Callable[[], None]) -> None:
        calls: list[int] = []
        original(self, lambda: work() if calls else calls.append(1))

    patch.setattr(CapturedGraph, "capture", capture)


def change_an_address_later(patch: pytest.MonkeyPatch, _: Machine) -> None:
    original = ForwardStep.run

    def run(self: Any, *args: Any) -> Any:
        for context in self._stages[0].stage.make_context.args[0]._contexts:
            context.set_tensor_address("position_ids", context._addresses["position_ids"])
        return original(self, *args)

    patch.setattr(ForwardStep, "run", run)


def wait_in_a_capture(patch: pytest.MonkeyPatch, _: Machine) -> None:
    then(patch, _StageStep, "body", lambda step: step.stage.stream.synchronize())


def use_a_context_once(patch: pytest.MonkeyPatch, _: Machine) -> None:
    then(
        patch,
        _StageStep,
        "body",
        lambda step: step.stage.make_context.args[0]._contexts.remove(step.stage.make_context()),
    )


def pin_in_a_capture(patch: pytest.MonkeyPatch, _: Machine) -> None:
    then(patch, _StageStep, "body", lambda _: torch.zeros(3, pin_memory=True))


def collect_in_a_capture(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(cuda_graph, "collector_off", nullcontext)


BROKEN: dict[str, tuple[Setting, Mutation, str]] = {
    "another device": (
        STAGED,
        make_contexts_elsewhere,
        "context of a context while another device is current",
    ),
    "no first run": (CHAIN, capture_at_once, "execute is captured before the context ran"),
    "a new address": (CHAIN, change_an_address_later, "address after the context was captured"),
    "a wait": (CHAIN, wait_in_a_capture, "synchronize while work is captured"),
    "a new context": (CHAIN, use_a_context_once, "context while work is captured"),
    "a context that is freed": (CHAIN, use_a_context_once, "destroy while work is captured"),
    "pinned memory": (CHAIN, pin_in_a_capture, "pin while work is captured"),
    "the collector": (CHAIN, collect_in_a_capture, "execute with the collector on"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    setting, mutate, words = BROKEN[name]
    with late_llm(planned(setting), setting, seed=1) as (machine, llm):
        mutate(monkeypatch, machine)
        generate(llm)
        assert words in violations(machine)
