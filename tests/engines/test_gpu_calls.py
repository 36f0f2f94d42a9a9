"""The engine for GPUs keeps the rules of TensorRT and CUDA (support/call_rules.py) in the calls
that it makes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import fake_tensorrt, late_gpus
from support.call_rules import Figures, figures, violations
from support.command import slow_but
from support.fake_cuda import Machine, install
from support.late_gpus import PROMPTS, QUICK, SETTINGS, Planned, Setting, late_llm
from support.mutants import mutate, then
from support.on_cache import OnCache

from eesd.common.manifest import load_manifest
from eesd.controllers.calibration import CostAwareTS
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.embed import embed
from eesd.runtime.engines import cuda_graph, forward_step
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.draft_loop import DraftLoop
from eesd.runtime.engines.forward_step import ForwardStep, _StageStep
from eesd.runtime.engines.trt_engine import TrtStageRunner
from eesd.runtime.llm import LLM, Speculation

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
    """The figures of rounds, the first ones left out, which prepare calls."""
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
    """Once for the chain of four steps, and once for verify, each a launch."""
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
    """It decides on the host after each draft step; of a plainly greedy chain after two, in one
    call."""
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
    """Where the host chooses, it waits for the logits of each call, too."""
    setting = Setting(1, 1, Speculation("fixed:k=4", guard=False, drafter="exit"))
    found = round_figures(planned(CHAIN), setting, PENALTY, on_device)
    assert set(found) == {Figures(waits=waits, replays=4 + 1, executes=0)}


@pytest.mark.parametrize("sampling", [Sampling(), PENALTY])
def test_logits_of_a_tree_stay_on_the_device(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """Also where a level is drafted in a call for each node, and each overwrites the logits of the
    one before it."""
    tree = SETTINGS["tree"]
    monkeypatch.setattr(
        forward_step, "fetch", lambda *_: pytest.fail("logits were copied to the host")
    )
    with late_llm(planned(tree), tree, seed=1) as (_, llm):
        llm.generate(PROMPTS[1], sampling, max_new_tokens=12, ignore_eos=True)


@contextmanager
def embedded(directory: Path) -> Iterator[tuple[Machine, LLM]]:
    """An LLM in a service. Its GPU is not the first one, its memory holds garbage, and no device is
    current."""
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
    """What an embedded LLM generates if other streams than its own do nothing before the second
    round. A capture would wait for them all."""
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


def preparing_a_draft_changes_the_cache(directory: Path) -> bool:
    """Whether caches that verify has filled are others when the draft has been prepared, and its
    calls captured."""
    with late_llm(directory, CHAIN, seed=1) as (_, llm):
        verify = llm.engines.verify
        draft = llm.engines.draft
        assert draft is not None
        kv_cache = verify.new_kv_caches()[0]
        OnCache(verify, kv_cache).prefill(PROMPTS[1], 0)
        before = kv_cache.values(0, llm.manifest.max_seq_len)
        draft.prepare([kv_cache])
        return not np.array_equal(kv_cache.values(0, llm.manifest.max_seq_len), before)


def test_preparing_a_draft_leaves_the_cache_as_it_is(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not preparing_a_draft_changes_the_cache(planned(CHAIN))
    again = (
        "self._device_inputs.copy_(self._host_inputs, non_blocking=True)  # capture() ran a step"
    )
    mutate(monkeypatch, DraftLoop, "run", again, "pass")
    assert preparing_a_draft_changes_the_cache(planned(CHAIN)), "nothing notices the mistake"


Mutation = Callable[[pytest.MonkeyPatch, Machine], object]


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
