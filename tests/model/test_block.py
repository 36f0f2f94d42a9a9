"""Tests that every description of a block gives the same result. With the same weights and tokens,
the decoder and the modules of both graphs compute the logits of transformers. Graphs pack the
weights of layers that share an input."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_checkpoints import FAMILIES, randomise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eesd.common.geometry import ExitConfig, Geometry, draft_caches, exit_caches
from eesd.common.manifest import MASKED
from eesd.common.quantization import LM_HEAD, Quantization, Quantizations, parts_of
from eesd.common.weights import EMBEDDINGS, SCALES, graph_shapes, packed_name, stored_weight
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import Decoder, ExitHead
from eesd.model.graphs import Draft, Verify
from eesd.model.initial_head import initial_names, joined
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import KV, Inputs
from eesd.runtime.engines.trt_plans import LONG_CACHE, one_node_is_faster
from lab.lease.engines import llama

TOLERANCE = 1e-4
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9]
"""A token tree in draft order, which begins with the root. The tree has three branches, and its
leaves are at depths 1 to 4."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Pair:
    """A checkpoint that both transformers and :class:`Checkpoint` have loaded."""

    reference: Any
    decoder: Decoder

    @property
    def geometry(self) -> Geometry:
        return self.decoder.geometry

    def expected(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.reference(tokens, use_cache=False).logits
        return logits


def load_pair(directory: Path) -> Pair:
    reference: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return Pair(reference.eval(), load_decoder(Checkpoint(directory)))


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> Pair:
    return load_pair(family_dir(request.param))


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def prompt_pass(decoder: Decoder, tokens: Tensor, slots: int) -> tuple[Tensor, list[KV]]:
    batch, count = tokens.shape
    caches = empty_caches(decoder.geometry, batch, slots)
    logits, caches = decoder(tokens, causal_inputs(decoder.geometry, batch, count, slots), caches)
    return logits, caches


def test_cached_steps_have_the_logits_of_transformers(pair: Pair) -> None:
    tokens = random_tokens(2, 20)
    expected = pair.expected(tokens)
    assert expected.std() > 0.5, "logits near zero would always agree"
    logits, caches = prompt_pass(pair.decoder, tokens[:, :13], slots=22)
    assert_close(logits, expected[:, :13])
    for step in range(13, 20):
        inputs = causal_inputs(pair.decoder.geometry, 2, 1, 22, start=step)
        logits, caches = pair.decoder(tokens[:, step : step + 1], inputs, caches)
        assert_close(logits, expected[:, step : step + 1])


def test_rejected_tokens_in_the_caches_do_not_matter(pair: Pair) -> None:
    """The next chunk overwrites some rejected tokens and masks the others."""
    tokens = random_tokens(1, 16)
    rejected = random_tokens(1, 9, seed=2)
    _, caches = prompt_pass(pair.decoder, torch.cat([tokens[:, :6], rejected], dim=1), slots=18)
    inputs = causal_inputs(pair.decoder.geometry, 1, 4, 18, start=6)
    logits, _ = pair.decoder(tokens[:, 6:10], inputs, caches)
    assert_close(logits, pair.expected(tokens)[:, 6:10])


def ancestors(node: int) -> list[int]:
    """Returns the path from the root to a node, including the root and the node."""
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def tree_inputs(decoder: Decoder, starts: list[int], slots: int) -> Inputs:
    """Returns the inputs for the tree after prompts of these lengths. Node i is in slot start + i,
    and its position is start + depth."""
    mask = torch.full((len(starts), 1, len(PARENTS), slots), MASKED)
    positions = torch.zeros(len(starts), len(PARENTS), dtype=torch.int64)
    for row, start in enumerate(starts):
        mask[row, :, :, :start] = 0
        for node in range(len(PARENTS)):
            path = ancestors(node)
            mask[row, 0, node, [start + ancestor for ancestor in path]] = 0
            positions[row, node] = start + len(path) - 1
    cos, sin = map(torch.tensor, rotary_tables(decoder.geometry, slots))
    return Inputs(cos, sin, positions, torch.tensor(starts), mask)


def test_every_path_of_a_token_tree_has_the_logits_of_its_chain(pair: Pair) -> None:
    """The prompts of the batch have different lengths, so their trees have different slots."""
    starts = [5, 8]
    slots = 24
    prompts = random_tokens(2, max(starts))
    tree = random_tokens(2, len(PARENTS), seed=2)
    _, caches = prompt_pass(pair.decoder, prompts, slots)
    logits, _ = pair.decoder(tree, tree_inputs(pair.decoder, starts, slots), caches)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = ancestors(leaf)
        for row, start in enumerate(starts):
            chain = torch.cat([prompts[row, :start], tree[row, path]])
            assert_close(logits[row, path], pair.expected(chain[None])[0, start:])


def test_sliding_window_equals_full_attention_up_to_the_limit(
    family_dir: Callable[[str], Path],
) -> None:
    pair = load_pair(family_dir("mistral-window"))
    limit = Checkpoint(family_dir("mistral-window")).config.max_positions
    tokens = random_tokens(1, limit + 1)
    logits = prompt_pass(pair.decoder, tokens, slots=limit + 1)[0]
    expected = pair.expected(tokens)
    assert_close(logits[:, :limit], expected[:, :limit])
    assert (logits[:, limit] - expected[:, limit]).abs().max() > TOLERANCE, "the limit is too low"


def made_head(decoder: Decoder, config: ExitConfig) -> ExitHead:
    parameters = decoder.state_dict()
    head = ExitHead(decoder.geometry, config)
    for name, parameter in head.named_parameters():
        parts = [
            parameters[source].numpy() for source in initial_names(decoder.geometry, config)[name]
        ]
        parameter.data.copy_(as_torch(joined(name, parts, decoder.geometry, config)))
    return head


@pytest.fixture(scope="module", params=[1, 2], ids=["E=1", "E=2"])
def head(request: pytest.FixtureRequest, pair: Pair) -> ExitHead:
    """A head with random weights, so that using the base model's block or norm by mistake is
    detected."""
    head = (
        made_head(pair.decoder, ExitConfig(layer=1, blocks=request.param))
        .requires_grad_(False)
        .eval()
    )
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
        return causal_inputs(self.decoder.geometry, batch, count, self.slots, start)

    def caches(self) -> list[KV]:
        count = exit_caches(*self.draft.described).stop
        return empty_caches(self.decoder.geometry, 2, self.slots, count)

    def draft_part(self, caches: list[KV]) -> list[KV]:
        return [caches[index] for index in self.used]


@pytest.fixture
def graphs(pair: Pair, head: ExitHead) -> Graphs:
    used = draft_caches(pair.geometry, head.exit_config)
    return Graphs(
        Draft(pair.decoder, head, top_k=5), Verify(pair.decoder, head), pair.decoder, used
    )


def assert_same_caches(actual: list[KV], expected: list[KV]) -> None:
    assert len(actual) == len(expected)
    for (keys, values), (expected_keys, expected_values) in zip(actual, expected, strict=True):
        assert expected_keys.abs().sum() > 0
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=2e-5)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-5)


def test_verify_fills_the_draft_caches_as_draft_steps_do(graphs: Graphs) -> None:
    """Both graphs run a prompt and its continuation. The draft graph runs them token by token, and
    the verify graph runs them in one pass."""
    tokens = random_tokens(2, 11)
    verified = graphs.caches()
    drafted = graphs.draft_part(graphs.caches())
    for begin, end in ((0, 6), (6, 11)):
        chunk = tokens[:, begin:end]
        _, verified = graphs.verify(chunk, graphs.inputs(chunk, begin), verified)
        for step in range(begin, end):
            token = tokens[:, step : step + 1]
            drafted = graphs.draft(token, graphs.inputs(token, step), drafted)[3]
        assert_same_caches(graphs.draft_part(verified), drafted)


def test_verify_writes_a_tree_into_the_draft_caches_as_the_draft_does(graphs: Graphs) -> None:
    prompt = random_tokens(2, 6)
    tree = random_tokens(2, len(PARENTS), seed=2)
    _, caches = graphs.verify(prompt, graphs.inputs(prompt, 0), graphs.caches())
    inputs = tree_inputs(graphs.decoder, [6, 4], graphs.slots)
    drafted = graphs.draft(
        tree, inputs, [(k.clone(), v.clone()) for k, v in graphs.draft_part(caches)]
    )[3]
    _, verified = graphs.verify(tree, inputs, caches)
    assert_same_caches(graphs.draft_part(verified), drafted)


def test_caches_are_written_in_place_without_autograd_and_copied_with_it(graphs: Graphs) -> None:
    tokens = random_tokens(2, 5)
    caches = graphs.caches()
    with torch.enable_grad():
        _, copies = graphs.verify(tokens, graphs.inputs(tokens, 0), caches)
    assert all(not cache.any() for pair in caches for cache in pair)
    _, written = graphs.verify(tokens, graphs.inputs(tokens, 0), caches)
    assert all(
        a is b
        for given, got in zip(caches, written, strict=True)
        for a, b in zip(given, got, strict=True)
    )
    assert_same_caches(caches, [(k.detach(), v.detach()) for k, v in copies])


def test_draft_reports_the_most_likely_tokens(graphs: Graphs) -> None:
    tokens = random_tokens(2, 9)
    logits, ids, logprobs, _ = graphs.draft(
        tokens, graphs.inputs(tokens, 0), graphs.draft_part(graphs.caches())
    )
    expected = torch.log_softmax(logits, dim=-1)
    assert ids.shape == logprobs.shape == (2, 9, 5)
    torch.testing.assert_close(logprobs, expected.gather(-1, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        logprobs, expected.sort(-1, descending=True)[0][..., :5], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_untrained_draft_computes_the_model_without_its_middle_layers(
    family_dir: Callable[[str], Path], blocks: int, own_lm_head: bool
) -> None:
    pair = load_pair(family_dir("llama-head-dim"))
    tokens = random_tokens(2, 9)
    geometry = pair.geometry
    head = made_head(
        pair.decoder, ExitConfig(layer=1, blocks=blocks, own_lm_head=own_lm_head)
    ).eval()
    caches = empty_caches(geometry, 2, 12, 1 + blocks)
    logits = Draft(pair.decoder, head, top_k=1)(tokens, causal_inputs(geometry, 2, 9, 12), caches)[
        0
    ]
    layers = pair.reference.model.layers
    pair.reference.model.layers = nn.ModuleList([layers[0], *layers[-blocks:]])
    pair.reference.config.num_hidden_layers = 1 + blocks
    assert_close(logits, pair.expected(tokens))


SLOTS = 16
LLAMA = llama(4, 64, 96, 4, 2, 97)
INT8 = Quantization("int8", 32)
INT4 = Quantization("int4", 32)


@pytest.mark.fast
def test_packed_weights_have_the_rows_of_their_parts() -> None:
    config = ExitConfig(1)
    apart = graph_shapes(LLAMA, config, SLOTS, range(2), draft=False, packed=False)
    packed = graph_shapes(LLAMA, config, SLOTS, range(2), draft=False)
    # In this layer, the verify graph computes only the keys and values.
    assert "exit_head.blocks.0.self_attn.kv_proj.weight" in packed
    for name, shape in packed.items():
        parts = [apart[part] for part in parts_of(name)]
        assert shape == (sum(part[0] for part in parts), *parts[0][1:])
        assert len(parts) == 1 or packed_name(parts_of(name)) == name
    assert sorted(part for name in packed for part in parts_of(name)) == sorted(apart)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("quantization", "drafts_with_int8"),
    [
        (Quantizations(), False),
        (Quantizations(layers=INT4, head=INT4, draft=INT4), False),
        (Quantizations(layers=INT8, head=INT8, draft=INT8), True),
        (Quantizations(layers=INT8, head=INT8, draft=INT4), False),
        (Quantizations(layers=INT8), True),
        (Quantizations(draft=INT8), True),
    ],
)
def test_one_node_is_not_faster_where_the_draft_has_int8_weights(
    quantization: Quantizations, drafts_with_int8: bool
) -> None:
    assert one_node_is_faster(LONG_CACHE, quantization) != drafts_with_int8


@pytest.mark.fast
def test_layers_with_levels_of_their_own_are_packed_if_they_are_alike() -> None:
    """A tied LM head is the embedding table, and the draft has no copy of this table. Biases stay
    separate, as their layers do."""
    geometry = replace(LLAMA, qkv_bias=True, tied_embeddings=True)
    layer = "model.layers.0"
    own = {EMBEDDINGS: replace(INT8, scales="float16")}
    own |= {f"{layer}.self_attn.{part}_proj.weight": INT4 for part in "qk"}
    own |= {
        f"{layer}.mlp.{part}_proj.weight": replace(INT4, minimums=True, scales="float32")
        for part in ("gate", "up")
    }
    quantization = Quantizations(draft=INT4, tensors=own)
    for draft in (True, False):
        shapes = graph_shapes(
            geometry, ExitConfig(1), SLOTS, range(4), draft, quantization=quantization
        )
        of_layer = {name for name in shapes if name.removeprefix("draft.").startswith(layer)}
        first = {name for name in of_layer if "self_attn" in name and "o_proj" not in name}
        value = f"{'draft.' * draft}{layer}.self_attn.v_proj.weight"
        apart = {
            f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")
        }
        assert first == apart - {f"{layer}.self_attn.v_proj.weight"} | {value}
        assert (
            f"{layer}.mlp.gate_up_proj.weight" in of_layer
            and LM_HEAD not in shapes
            and "draft.lm_head.weight" not in shapes
        )
        table = stored_weight(EMBEDDINGS, shapes[EMBEDDINGS], "float32", quantization)
        rows, width = shapes[EMBEDDINGS]
        assert not table.transposed and table.scales_shape == (rows, width // 32)
        assert table.tensors == {
            EMBEDDINGS: rows * width,
            EMBEDDINGS + SCALES: rows * width // 32 * 2,
        }
