"""The decoder and the two graphs against transformers: same weights, same tokens, same logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_checkpoints import FAMILIES, LLAMA3_ORIGINAL, randomise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eesd.common.geometry import ExitConfig
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import KV, MASKED, Decoder, Inputs, causal_inputs, empty_caches, rotary_tables
from eesd.model.exit_head import ExitHead, initialise
from eesd.model.graphs import Draft, Verify, draft_layers

TOLERANCE = 1e-4
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9]
"""A token tree in draft order, root first: three branches, leaves between depth 1 and 4."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Pair:
    """One checkpoint, read by transformers and by us."""

    reference: Any
    decoder: Decoder

    def expected(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.reference(tokens, use_cache=False).logits
        return logits


def load_pair(directory: Path) -> Pair:
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return Pair(reference.eval(), Checkpoint(directory).decoder())


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> Pair:
    return load_pair(family_dir(request.param))


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def prompt_pass(decoder: Decoder, tokens: Tensor, slots: int) -> tuple[Tensor, list[KV]]:
    batch, count = tokens.shape
    caches = empty_caches(decoder.config, batch, slots, decoder.config.num_layers)
    logits, caches = decoder(tokens, causal_inputs(decoder.config, batch, count, slots), caches)
    return logits, caches


def test_prompt_pass(pair: Pair) -> None:
    tokens = random_tokens(2, 24)
    expected = pair.expected(tokens)
    assert expected.std() > 0.5, "logits near zero would agree whatever the decoder does"
    assert_close(prompt_pass(pair.decoder, tokens, slots=31)[0], expected)


def test_cached_steps(pair: Pair) -> None:
    tokens = random_tokens(2, 20)
    expected = pair.expected(tokens)
    logits, caches = prompt_pass(pair.decoder, tokens[:, :13], slots=22)
    assert_close(logits, expected[:, :13])
    for step in range(13, 20):
        inputs = causal_inputs(pair.decoder.config, 2, 1, 22, start=step)
        logits, caches = pair.decoder(tokens[:, step : step + 1], inputs, caches)
        assert_close(logits, expected[:, step : step + 1])


def test_chunks_after_a_rollback(pair: Pair) -> None:
    """Rejected tokens stay in their slots; the next chunk writes over some of them and masks the others."""
    tokens = random_tokens(1, 16)
    rejected = random_tokens(1, 9, seed=2)
    _, caches = prompt_pass(pair.decoder, torch.cat([tokens[:, :6], rejected], dim=1), slots=18)
    inputs = causal_inputs(pair.decoder.config, 1, 4, 18, start=6)
    logits, _ = pair.decoder(tokens[:, 6:10], inputs, caches)
    assert_close(logits, pair.expected(tokens)[:, 6:10])


def ancestors(node: int) -> list[int]:
    """The path from the root to a node, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def tree_inputs(decoder: Decoder, starts: list[int], slots: int) -> Inputs:
    """Inputs for the tree after prompts of these lengths: node i lies in slot start + i, at position start + depth."""
    mask = torch.full((len(starts), 1, len(PARENTS), slots), MASKED)
    positions = torch.zeros(len(starts), len(PARENTS), dtype=torch.int64)
    for row, start in enumerate(starts):
        mask[row, :, :, :start] = 0
        for node in range(len(PARENTS)):
            path = ancestors(node)
            mask[row, 0, node, [start + ancestor for ancestor in path]] = 0
            positions[row, node] = start + len(path) - 1
    return Inputs(*rotary_tables(decoder.config, slots), positions, torch.tensor(starts), mask)


def test_token_tree(pair: Pair) -> None:
    """Prompts of different lengths, so that every row writes elsewhere; each node against its own chain."""
    starts, slots = [5, 8], 24
    prompts, tree = random_tokens(2, max(starts)), random_tokens(2, len(PARENTS), seed=2)
    _, caches = prompt_pass(pair.decoder, prompts, slots)
    logits, _ = pair.decoder(tree, tree_inputs(pair.decoder, starts, slots), caches)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = ancestors(leaf)
        for row, start in enumerate(starts):
            chain = torch.cat([prompts[row, :start], tree[row, path]])
            assert_close(logits[row, path], pair.expected(chain[None])[0, start:])


def test_llama3_scaling_beyond_the_original_positions(family_dir: Callable[[str], Path]) -> None:
    pair = load_pair(family_dir("llama3"))
    tokens = random_tokens(1, LLAMA3_ORIGINAL + 32)
    assert_close(prompt_pass(pair.decoder, tokens, slots=100)[0], pair.expected(tokens))


def test_sliding_window_is_plain_attention_up_to_the_limit(family_dir: Callable[[str], Path]) -> None:
    pair = load_pair(family_dir("mistral-window"))
    limit = pair.decoder.config.max_positions
    tokens = random_tokens(1, limit + 1)
    logits = prompt_pass(pair.decoder, tokens, slots=limit + 1)[0]
    expected = pair.expected(tokens)
    assert_close(logits[:, :limit], expected[:, :limit])
    assert (logits[:, limit] - expected[:, limit]).abs().max() > TOLERANCE, "the limit is lower than it has to be"


@pytest.fixture(scope="module", params=[1, 2], ids=["E=1", "E=2"])
def head(request: pytest.FixtureRequest, pair: Pair) -> ExitHead:
    """A head that shares nothing with the base model, so that using the wrong block or norm shows."""
    head = initialise(pair.decoder, ExitConfig(layer=1, blocks=request.param)).requires_grad_(False).eval()
    randomise(head, seed=7)
    return head


@dataclass(frozen=True)
class Graphs:
    draft: Draft
    verify: Verify
    decoder: Decoder
    used: list[int]
    slots: int = 20

    def inputs(self, tokens: Tensor, start: int) -> Inputs:
        batch, count = tokens.shape
        return causal_inputs(self.decoder.config, batch, count, self.slots, start)

    def caches(self) -> list[KV]:
        layers = self.decoder.config.num_layers + self.draft.exit_head.exit_config.blocks
        return empty_caches(self.decoder.config, 2, self.slots, layers)

    def draft_part(self, caches: list[KV]) -> list[KV]:
        return [caches[index] for index in self.used]


@pytest.fixture
def graphs(pair: Pair, head: ExitHead) -> Graphs:
    used = draft_layers(head, pair.decoder.config.num_layers)
    return Graphs(Draft(pair.decoder, head, top_k=5), Verify(pair.decoder, head), pair.decoder, used)


def assert_same_caches(actual: list[KV], expected: list[KV]) -> None:
    assert len(actual) == len(expected)
    for (keys, values), (expected_keys, expected_values) in zip(actual, expected, strict=True):
        assert expected_keys.abs().sum() > 0
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-5)


def test_draft_layers(graphs: Graphs) -> None:
    layers, blocks = graphs.decoder.config.num_layers, graphs.draft.exit_head.exit_config.blocks
    assert graphs.used == [0, layers, layers + 1][: 1 + blocks]


def test_verify_is_the_decoder(graphs: Graphs) -> None:
    tokens = random_tokens(2, 9)
    logits, caches = graphs.verify(tokens, graphs.inputs(tokens, 0), graphs.caches())
    expected, expected_caches = prompt_pass(graphs.decoder, tokens, graphs.slots)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert_same_caches(caches[: len(expected_caches)], expected_caches)


def test_verify_leaves_the_caches_as_the_draft_would(graphs: Graphs) -> None:
    """The draft token by token, the verify pass at once, on a prompt and again on what follows it."""
    tokens = random_tokens(2, 11)
    verified, drafted = graphs.caches(), graphs.draft_part(graphs.caches())
    for begin, end in ((0, 6), (6, 11)):
        chunk = tokens[:, begin:end]
        _, verified = graphs.verify(chunk, graphs.inputs(chunk, begin), verified)
        for step in range(begin, end):
            token = tokens[:, step : step + 1]
            drafted = graphs.draft(token, graphs.inputs(token, step), drafted)[3]
        assert_same_caches(graphs.draft_part(verified), drafted)


def test_verify_writes_a_tree_as_the_draft_would(graphs: Graphs) -> None:
    prompt, tree = random_tokens(2, 6), random_tokens(2, len(PARENTS), seed=2)
    _, caches = graphs.verify(prompt, graphs.inputs(prompt, 0), graphs.caches())
    inputs = tree_inputs(graphs.decoder, [6, 4], graphs.slots)
    drafted = graphs.draft(tree, inputs, [(k.clone(), v.clone()) for k, v in graphs.draft_part(caches)])[3]
    _, verified = graphs.verify(tree, inputs, caches)
    assert_same_caches(graphs.draft_part(verified), drafted)


def test_caches_are_written_in_place_unless_gradients_are_wanted(graphs: Graphs) -> None:
    tokens = random_tokens(2, 5)
    caches = graphs.caches()
    with torch.enable_grad():
        _, copies = graphs.verify(tokens, graphs.inputs(tokens, 0), caches)
    assert all(not cache.any() for pair in caches for cache in pair)
    _, written = graphs.verify(tokens, graphs.inputs(tokens, 0), caches)
    assert all(a is b for given, got in zip(caches, written, strict=True) for a, b in zip(given, got, strict=True))
    assert_same_caches(caches, [(k.detach(), v.detach()) for k, v in copies])


def test_draft_top_k(graphs: Graphs) -> None:
    tokens = random_tokens(2, 9)
    logits, ids, logprobs, _ = graphs.draft(tokens, graphs.inputs(tokens, 0), graphs.draft_part(graphs.caches()))
    everything = torch.log_softmax(logits, dim=-1)
    assert ids.shape == logprobs.shape == (2, 9, 5)
    torch.testing.assert_close(logprobs, everything.gather(-1, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs, everything.sort(-1, descending=True)[0][..., :5], rtol=0, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_untrained_draft_is_the_model_without_its_middle(
    family_dir: Callable[[str], Path], blocks: int, own_lm_head: bool
) -> None:
    pair = load_pair(family_dir("llama-head-dim"))
    tokens, config = random_tokens(2, 9), pair.decoder.config
    head = initialise(pair.decoder, ExitConfig(layer=1, blocks=blocks, own_lm_head=own_lm_head)).eval()
    caches = empty_caches(config, 2, 12, 1 + blocks)
    logits = Draft(pair.decoder, head, top_k=1)(tokens, causal_inputs(config, 2, 9, 12), caches)[0]
    layers = pair.reference.model.layers
    pair.reference.model.layers = nn.ModuleList([layers[0], *layers[-blocks:]])
    pair.reference.config.num_hidden_layers = 1 + blocks
    assert_close(logits, pair.expected(tokens))


def test_own_lm_head_takes_the_place_of_the_base(family_dir: Callable[[str], Path]) -> None:
    decoder = load_pair(family_dir("qwen3")).decoder
    head = initialise(decoder, ExitConfig(layer=2, own_lm_head=True)).requires_grad_(False).eval()
    assert head.lm_head is not None
    head.lm_head.weight.mul_(3)
    tokens, caches = random_tokens(1, 5), empty_caches(decoder.config, 1, 6, 3)
    inputs = causal_inputs(decoder.config, 1, 5, 6)
    tripled = Draft(decoder, head, top_k=1)(tokens, inputs, caches)[0]
    head.lm_head = None
    torch.testing.assert_close(tripled, 3 * Draft(decoder, head, top_k=1)(tokens, inputs, caches)[0])
