"""This module describes the model once. Blocks, exit heads, the draft graph and the verify graph
are written as calls of some fifteen operations.

Nothing else describes a block. A *table of operations* (:class:`Operations`) gives the operations a
meaning. One table computes the shapes of the weights. Other tables write a standard ONNX graph,
write a graph of this project's operators, or run torch. A new part of a block is written here and
in the tables that support it.

The **draft graph** consists of the first N layers and the exit head. The **verify graph** is the
whole model. Both graphs share one set of caches. The caches of the base layers come first, then
those of the exit blocks, and then any caches of states that a head reads. A layer has one cache,
except that a recurrent layer may have several, and a layer that reads another layer's keys and
values has none. A verify pass writes all of these caches, so the draft can continue right after it.
The verify graph can be split by layers into stages. If the head reads states of layers, the verify
graph must be a single stage.

An **exit head** follows layer N. It has E blocks, a norm, and an LM head (the base model's or a
separate one). A head without blocks has no caches. This is the early exit of models that were
trained for it (LayerSkip, arXiv 2404.16710).

A head may also read the deep layers. The verify graph then projects the states after some of these
layers to a *deep state* of 2 KV D numbers for each token. It writes the deep state into the token's
slot of the deep cache, as if it were keys and values. A draft step reads the deep state of the
token before its first token, projects it back, and adds it after the head's last attention. It also
copies the deep state into the slots of its own tokens. So all steps of a round read the deep state
of the token before the root. This is the last deep state that a verify pass computed, and the draft
graph needs no input for its slot.

An **EAGLE-3** head (arXiv 2503.01840) has one block, which runs after the embeddings. The block
reads a token's embedding and a state of the previous token. If the previous token is the token
before the root, the verify graph computed the state by fusing the hidden states of three layers
with a product. If the previous token was drafted, the head computed the state. Both kinds of states
are stored in caches of states, in the slot of the token that they describe. So a draft step reads
the slot of each token's parent and writes the token's slot. The verify graph overwrites the drafted
states with fused states, and computes the block's keys and values from the fused states. All graphs
have the same inputs, and code that moves or keeps caches handles states, too. The first token of a
text has no parent, so the published heads have no keys for it. Only the first token attends to its
own slot.

**Short convolutions** (LFM2) replace attention in some layers. Each token's state is stored in its
slot of the layer's caches, as keys are. A token reads the states of the tokens before it on its
path. So nothing has to be undone when drafted tokens are rejected.

**The gated delta rule** (Qwen3-Next, arXiv 2412.06464) replaces attention, too. Each value head has
a matrix S as its state. A token convolves its queries, keys and values with the queries, keys and
values of the tokens before it. Then it decays S, and adds the outer product of its key and the
*delta* u to S. The delta is the token's value minus the value that S gives for the key. The token's
output is the value that S gives for its query. So S is a sum, over the earlier tokens, of decayed
outer products of keys and deltas. A slot holds the convolution's inputs, the key, the deltas and
the decays of its token. Again nothing has to be undone when drafted tokens are rejected.

A **state space** (Mamba-2, arXiv 2405.21060) is the same sum. Its delta is the token's value times
the token's step, which also decides the decay. Queries and keys are not normalized, and each head
adds a multiple of its value to its output. In some models it runs next to attention.

**Latent attention** (DeepSeek, arXiv 2405.04434) stores one compressed row c and one rotated key
for each token in the cache. A head's key is K c followed by the rotated key, and its value is V c.
Since q K c = (q K) c, each head's query is multiplied by K instead, and the weighted sum of the
rows is multiplied by V afterwards. So all heads attend to the rows in the cache, as if there were
one KV head whose values are the first part of its keys.

In **Gemma 4**, the two kinds of layers have heads of different sizes, and the last layers of some
models read the keys and values of earlier layers. In some models each layer also reads an input.
This input is a second embedding of the token, plus a projection of the first embedding.

The module needs neither torch nor onnx.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from eesd.common.geometry import (
    BESIDE,
    CONVOLUTION,
    DELTA,
    FULL,
    Eagle,
    ExitConfig,
    Experts,
    Geometry,
    Latent,
    draft_columns,
    exit_caches,
)
from eesd.common.quantization import EXIT_HEAD

X = TypeVar("X")
"""Type of the values that a table of operations computes with."""
EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LM_HEAD = "lm_head"
"""Names of the modules before and after the base layers. A weight's name is its module's name
followed by ``.weight``."""
LOGIT_BIAS = "logit_bias"
"""Name of the biases of the logits. The weight is [V]."""
INPUTS = "model.embed_inputs"
INPUT_PROJECTION = "model.input_proj"
INPUT_NORM = "model.input_norm"
"""Names of the modules that compute the layers' inputs. They are an embedding, a projection of the
model's embeddings, and a norm that is applied to each layer's part of the projection. The norm
includes the factor of the sum."""
LAYER_SCALE = "layer_scale"
"""Name, within a block, of the factor that multiplies the block's output. The weight is [1]."""
ROUTER_NORM = "mlp.gate_norm"
EXPERT_SCALES = "mlp.expert_scales"
MLP_NORM = "mlp.dense_norm"
EXPERTS_NORM = "mlp.experts_input_norm"
MIXED_NORM = "mlp.experts_norm"
"""Names within a block that has an MLP next to experts. They belong to the router's norm, the
factors of the experts, the norm of the MLP's output, and the norms before and after the experts."""
ROUTER = "mlp.gate"
"""Name, within a block, of the product that chooses experts."""
CHOICE_BIAS = "mlp.choice_bias"
"""Name, within a block, of the biases that are added to choose experts. The weight is [experts]. It
is always float32 because the differences of the sums are small."""
SHARED = "mlp.shared_expert"
"""Name, within a block, of the expert that every token uses. The name of this expert's gate also
ends in ``_gate``."""
FUSE = "fuse_proj"
FUSE_NORM = "fuse_norm"
"""Names, in an EAGLE-3 head, of the product that fuses the states of layers, and of the norms
before this product."""
SINKS = "self_attn.sinks"
"""Name, within a block, of the sinks of the attention heads. Its weight is [heads]."""
TAPS = "conv.conv"
"""Name, within a block, of the convolution. Its weight is [hidden, 1, taps]. The last tap is for
the token itself."""
DELTA_TAPS = "linear_attn.conv1d"
DELTA_DECAY = "linear_attn.decay"
DELTA_BIAS = "linear_attn.dt"
DELTA_NORM = "linear_attn.norm"
DELTA_SKIP = "linear_attn.skip"
DELTA_TAPS_BIAS = "linear_attn.conv1d_bias"
"""Names, within a block, of the parameters of the delta rule or state space. They are the
convolution [mixed, 1, taps], the logarithm of the decay [value_heads], the bias of the decay's
input [value_heads], and the norm of the heads [value_dim]. A state space has a norm of all heads
[values], if any, the factors of the values in the output [value_heads], and perhaps biases of the
convolution [mixed]."""
LATENT_EPS = 1e-6
"""Epsilon of the norms within latent attention. It is a constant in transformers."""
DELTA_EPS = 1e-6
"""Number that is added to the sum of squares when queries and keys of the delta rule are
normalized."""
SPACE_INPUTS = "linear_attn.factors"
SPACE_OUTPUT = "linear_attn.out_factors"
ATTENTION_OUTPUT = "self_attn.factors"
GATE_FACTORS = "mlp.gate_factors"
UP_FACTORS = "mlp.up_factors"
"""Names, within a block with factors, of the factors of a state space's inputs [columns], of the
inputs of both output projections [1], and of an MLP's gate and up projections [1]."""
DEEP_IN = "deep_in_proj"
"""Name, in the exit head, of the product that projects a deep state into the draft."""
CLAMP = 7.0
CLAMPED_SLOPE = 1.702
"""Constants of the activation ``clamped``. They are the limit of gate and up, and the factor of the
gate within the sigmoid."""
XIELU = "mlp.act_fn"
"""Name, within a block, of xielu's parameters. The weight is [2]. It holds the factor of the square
for positive x, and the factor of the exponential for negative x."""
XIELU_SLOPE = 0.5
"""Factor of x in xielu."""
XIELU_LIMIT = -1e-6
"""Largest argument of the exponential in xielu."""


class Linear(NamedTuple):
    """A linear layer.

    Attributes:
        name: Name of the module.
        outputs: Number of outputs.
        bias: Whether it has a bias.
    """

    name: str
    outputs: int
    bias: bool = False


class Norm(NamedTuple):
    """A norm.

    Attributes:
        name: Name of the module.
        eps: Number that is added to the mean square, or to the variance.
        centred: Whether it is a LayerNorm, which subtracts the mean. If not, it is an RMSNorm.
        bias: Whether it adds a bias.
        groups: Number of equal groups of columns that are normalized separately, with the same
            weights.
        bare: Number of values per group if the norm has no weights, or 0 if it has weights.
    """

    name: str
    eps: float
    centred: bool = False
    bias: bool = False
    groups: int = 1
    bare: int = 0


class Table(NamedTuple):
    """An embedding table.

    Attributes:
        name: Name of the module.
        columns: Number of columns.
        scale: Factor of the embeddings.
    """

    name: str
    columns: int
    scale: float


def norm_of(geometry: Geometry, name: str) -> Norm:
    """Returns the norm called ``name``. It has the options of the geometry."""
    return Norm(name, geometry.rms_norm_eps, geometry.centred_norms, geometry.norm_bias)


class Mixture(NamedTuple):
    """The parts of a mixture of experts.

    Attributes:
        router: Linear layer that chooses experts.
        experts: Gate, up and down of each expert.
        router_norm: Norm before the router. If it is None, the router reads the output of the
            experts' norm.
        scales: Module whose weights [experts] multiply the shares of the experts. The name is empty
            if there is no such module.
        bias: Module whose weights [experts] are added to the scores when experts are chosen. The
            name is empty if there is no such module.
    """

    router: Linear
    experts: Sequence[tuple[Linear, Linear, Linear]]
    router_norm: Norm | None = None
    scales: str = ""
    bias: str = ""


@dataclass(frozen=True)
class Block:
    """A decoder block.

    Attributes:
        geometry: Geometry of this block, with or without experts.
        prefix: Prefix of the names of its modules, such as ``model.layers.3.``.
        cache: Index of its cache. A recurrent layer has several caches, and this is the index of
            the first.
        kind: Kind of layer; see :class:`~eesd.common.geometry.Geometry`.
        eagle: The EAGLE-3 head that the block belongs to, or None for other blocks. The block's
            attention then reads an embedding and a state side by side, hides the first slot, and
            has separate rotary tables.
        mlp: Width of the MLP. If it is 0, the block has no MLP. If it is None, the MLP has the
            geometry's width.
        writes: Whether it has keys and values. If not, it reads another block's keys and values.
    """

    geometry: Geometry
    prefix: str
    cache: int
    kind: str = FULL
    eagle: Eagle | None = None
    mlp: int | None = None
    writes: bool = True

    def norm(self, name: str) -> Norm:
        """A norm of the block."""
        return norm_of(self.geometry, f"{self.prefix}{name}")

    @property
    def state_caches(self) -> range:
        """Indices of the caches for a recurrent layer's states."""
        first = self.cache + (self.kind == BESIDE)
        return range(first, first + self.geometry.state_caches)

    @property
    def output(self) -> str:
        """Name of its output in a graph."""
        if self.geometry.layer_scale:
            return f"{self.prefix}scaled"
        return f"{self.prefix}{'with_input' if self.geometry.input_size else 'out'}"


class Operations(Protocol[X]):
    """The operations on values of type X. These values represent hidden states [..., columns] of
    some tokens.

    ``name`` is the name of the result in a graph.
    """

    def embed(self, ids: X, table: Table) -> X:
        """The embeddings of token ids, times the table's factor."""
        ...

    def weight(self, module: str, size: int) -> X:
        """The weight [size] of a module."""
        ...

    def multiply(self, x: X, y: X, name: str) -> X:
        """x times y, value by value. If x or y is a single value, it multiplies every value of the
        other."""
        ...

    def times(self, x: X, module: str, size: int, name: str) -> X:
        """x times the weight [size] of a module, which is always float32. The size is 1 or the
        number of columns of x."""
        ...

    def limit(self, x: X, most: float, name: str) -> X:
        """x, limited to -most .. most."""
        ...

    def norm(self, x: X, norm: Norm) -> X:
        """RMSNorm or LayerNorm."""
        ...

    def scale(self, x: X, gate: X, name: str) -> X:
        """x times the sigmoid of ``gate``, which has one column or the columns of x."""
        ...

    def activate(self, x: X, block: Block, name: str) -> X:
        """The activated values of an MLP without a gate."""
        ...

    def product(
        self,
        x: X,
        layers: Sequence[Linear],
        name: str,
        norm: Norm | None = None,
        residual: Sequence[X] = (),
        activation: str = "",
    ) -> X:
        """Returns the outputs of several linear layers with input x, side by side, plus
        ``residual``.

        ``norm`` is applied to x first. If there is an ``activation``, the layers are the gate and
        the up projection of an MLP, and the result is the activated gate times up.
        """
        ...

    def mixture(
        self,
        x: X,
        block: Block,
        mixture: Mixture,
        name: str,
        norm: Norm | None,
        residual: Sequence[X],
    ) -> X:
        """The weighted sum of the few MLPs that the router chooses for each token."""
        ...

    def add(self, residual: Sequence[X], y: X, name: str) -> X:
        """The sum of the states in ``residual`` and of y. Tables may add them in different
        orders."""
        ...

    def split(self, x: X, sizes: Sequence[int], names: Sequence[str]) -> Sequence[X]:
        """Parts of the columns."""
        ...

    def concat(self, parts: Sequence[X], name: str) -> X:
        """Columns side by side."""
        ...

    def by_heads(self, x: X, layers: Sequence[Linear], name: str) -> X:
        """The outputs of a linear layer for each head, side by side. The inputs of the heads are
        equal parts of x."""
        ...

    def attention(self, qkv: X, block: Block, name: str, attends: bool) -> X:
        """Write keys and values into the block's cache, and attend to it.

        Args:
            qkv: Queries, keys and values of all heads side by side. Without ``attends`` there are
                no queries, and the result is not used. A block that does not write has only
                queries. With latent attention, these are the queries of all heads, the rotated
                parts of all queries, and the token's row. The result then has the size of a
                compressed row for each head.
            block: The block. Its geometry defines how heads are normalized, rotated and scored.
            name: Name of the result.
            attends: Whether ``qkv`` has queries.
        """
        ...

    def convolution(self, x: X, block: Block, name: str) -> X:
        """Gate, convolve and gate again.

        Args:
            x: Three parts (``a``, b and c) side by side. Each part has the hidden size.
            block: The block. The state of a token is ``a`` times c. It is written into the token's
                slots of the block's caches.
            name: Name of the result. The result is b times a weighted sum of the states of the
                token and of the tokens before it. The weights depend on distance and column.
        """
        ...

    def delta_rule(self, x: X, block: Block, name: str) -> X:
        """The gated delta rule or a state space.

        Args:
            x: The inputs, side by side. First come queries, keys and values, which are convolved.
                Then come the gates of the output. The last parts are the inputs of the step size
                and of the decay of each value head. In a state space, both have the same input.
            block: The block. The tokens' states are written into the tokens' slots of the block's
                caches.
            name: Name of the result. The result has the outputs of all heads, multiplied by their
                gates. The delta rule normalizes the outputs first.
        """
        ...

    def write_state(self, x: X, name: str) -> X:
        """Write states into the tokens' slots of the state caches."""
        ...

    def carry_state(self, name: str) -> X:
        """The deep state before the first token, which is copied to the slots of all tokens."""
        ...

    def parent_state(self, name: str, written: X | None = None) -> X:
        """The state of each token's parent. ``written`` holds the states that were just written, if
        any."""
        ...

    def last(self, x: X) -> X:
        """The rows of the tokens that get logits."""
        ...

    def logits(self, x: X, head: Linear, norm: Norm | None, cap: float) -> X:
        """The logits in float32, limited to -cap .. cap unless ``cap`` is 0. If ``head`` has a
        bias, it is the weight of :data:`LOGIT_BIAS`."""
        ...


class Model(NamedTuple):
    """A base model and its exit head."""

    geometry: Geometry
    head: ExitConfig

    def layer(self, index: int) -> Block:
        """The block of a base layer."""
        geometry = self.geometry
        kind = geometry.kind(index)
        cache = geometry.caches_of(index).start
        own = geometry.of_layer(index)
        writes = not geometry.shares(index)
        return Block(own, f"model.layers.{index}.", cache, kind, writes=writes)

    def exit_block(self, index: int) -> Block:
        """A block of the exit head."""
        geometry = self.geometry
        eagle = self.head.eagle
        prefix = f"{EXIT_HEAD}blocks.{index}."
        cache = exit_caches(geometry, self.head)[index]
        if eagle is not None:
            return Block(eagle.block, prefix, cache, FULL, eagle)
        layer = geometry.head_layers(self.head.blocks)[index]
        own = geometry.of_head(layer)
        kind = geometry.kind(layer).replace(BESIDE, FULL)
        return Block(own, prefix, cache, kind, mlp=self.head.mlp)

    @property
    def embeddings(self) -> Table:
        """The embeddings of the base model."""
        geometry = self.geometry
        return Table(EMBEDDING, geometry.hidden_size, geometry.embedding_scale)

    @property
    def final_norm(self) -> Norm:
        """The norm before the base model's LM head."""
        return norm_of(self.geometry, FINAL_NORM)

    def head_norm(self, name: str) -> Norm:
        """A norm of the exit head."""
        eagle = self.head.eagle
        geometry = self.geometry if eagle is None else eagle.block
        return norm_of(geometry, f"{EXIT_HEAD}{name}")

    @property
    def state_width(self) -> int:
        """Number of columns of a deep state. It has the size of the keys and values of a token in
        one cache."""
        return self.geometry.cache_columns

    @property
    def state_caches(self) -> range:
        """Indices of the caches of states."""
        return exit_caches(self.geometry, self.head)[self.head.blocks :]


def verify(o: Operations[X], model: Model, x: X, layers: range) -> X:
    """The whole model, or a stage of it.

    Args:
        o: The table of operations.
        model: The model.
        x: Token ids if this is the first stage, or hidden states if it is a later stage.
        layers: The base layers of the stage.

    Returns:
        The logits if this is the last stage, or the hidden states if it is an earlier stage.
    """
    geometry, head = model
    states: list[X] = []
    embedded = state = x
    for index, state in base_layers(o, model, x, layers):
        if index == layers.start:
            embedded = state
            continue
        if index == head.layer:
            _write_exit_caches(o, model, state)
        if index in head.read_layers:
            states.append(state)
    if states and head.eagle:
        _write_eagle(o, model, embedded, states)
    elif states:
        o.write_state(deep_state(o, model, states), "deep_state")
    if layers.stop < geometry.num_layers:
        return state
    columns = Linear(LM_HEAD, geometry.vocab_size, geometry.logit_bias)
    return o.logits(o.last(state), columns, model.final_norm, geometry.logit_cap)


def base_layers(o: Operations[X], model: Model, x: X, layers: range) -> Iterator[tuple[int, X]]:
    """Yields the hidden states before and after each base layer, together with the number of layers
    before them.

    Args:
        o: The table of operations.
        model: The model.
        x: Token ids if ``layers`` begins with the model's first layer, or hidden states if it does
            not.
        layers: The base layers, in order.
    """
    inputs: Sequence[X] = ()
    if layers.start == 0:
        ids = x
        x = o.embed(ids, model.embeddings)
        inputs = _layer_inputs(o, model.geometry, ids, x)
    yield layers.start, x
    for index in layers:
        x = block(o, model.layer(index), x, inputs[index] if inputs else None)
        yield index + 1, x


def after_layers(o: Operations[X], model: Model, x: X, count: int) -> X:
    """The hidden states after the first ``count`` layers, from token ids x."""
    for _, state in base_layers(o, model, x, range(count)):
        x = state
    return x


def _layer_inputs(o: Operations[X], geometry: Geometry, ids: X, embedded: X) -> Sequence[X]:
    """The inputs of all layers from token ids. The projection of the embeddings is normalized as if
    it were divided by the square root of the hidden size."""
    size = geometry.input_size
    count = geometry.input_layers
    if not size:
        return []
    table = Table(INPUTS, count * size, (size / 2) ** 0.5)
    norm = norm_of(geometry, INPUT_NORM)
    norm = norm._replace(eps=norm.eps * geometry.hidden_size, groups=count)
    projected = o.product(embedded, [Linear(INPUT_PROJECTION, table.columns)], "projected_inputs")
    found = o.add([o.embed(ids, table)], o.norm(projected, norm), "inputs")
    return o.split(found, [size] * count, [f"input_{index}" for index in range(count)])


def _add_input(o: Operations[X], of: Block, x: X, given: X) -> X:
    """Add a layer's input, gated by its state x."""
    geometry = of.geometry
    gate = [Linear(f"{of.prefix}input_gate_proj", geometry.input_size)]
    active = o.activate(
        o.product(x, gate, f"{of.prefix}input_gate"), of, f"{of.prefix}input_active"
    )
    gated = o.multiply(active, given, f"{of.prefix}input_gated")
    layer = [Linear(f"{of.prefix}input_out_proj", geometry.hidden_size)]
    added = o.norm(o.product(gated, layer, f"{of.prefix}input_out"), of.norm("input_norm"))
    return o.add([x], added, f"{of.prefix}with_input")


def draft(o: Operations[X], model: Model, x: X) -> X:
    """Run the first N layers and the exit head. Returns the logits of token ids x."""
    return exit_head(o, model, after_layers(o, model, x, model.head.layer))


def exit_head(o: Operations[X], model: Model, x: X) -> X:
    """The logits of the exit head, from the hidden states x after layer N."""
    geometry, head = model
    columns = Linear(LM_HEAD, draft_columns(geometry, head))
    if head.own_lm_head:
        columns = columns._replace(name=f"{EXIT_HEAD}{LM_HEAD}")
    elif not head.blocks:
        columns = columns._replace(bias=geometry.logit_bias)
    if head.eagle:
        return o.logits(_eagle_features(o, model, head.eagle, x), columns, None, 0.0)
    more: list[X] = []
    if head.deep:
        more.append(deep_in(o, model, o.carry_state("deep_state")))
    x = finish_head(o, model, attend_in_head(o, model, x, more))
    cap = 0.0 if head.blocks else geometry.logit_cap
    return o.logits(x, columns, model.head_norm("norm"), cap)


def attend_in_head(o: Operations[X], model: Model, x: X, more: Sequence[X] = ()) -> X:
    """The part of the exit head that reads other tokens. It ends with the last attention, to which
    ``more`` is added."""
    last = model.head.blocks - 1
    if last < 0:
        return x
    for index in range(last):
        x = block(o, model.exit_block(index), x)
    return attend(o, model.exit_block(last), x, [x, *more])


def finish_head(o: Operations[X], model: Model, x: X) -> X:
    """The rest of the exit head's blocks, which processes each token separately."""
    blocks = model.head.blocks
    return feed_forward(o, model.exit_block(blocks - 1), x) if blocks else x


def block(o: Operations[X], of: Block, x: X, given: X | None = None) -> X:
    """A block's output for hidden states x, and the layer's inputs if there are any."""
    attended = attend(o, of, x, [x])
    if of.geometry.parallel:
        return _feed(o, of, x, of.norm("input_layernorm"), attended)
    x = feed_forward(o, of, attended)
    if given is not None:
        x = _add_input(o, of, x, given)
    if not of.geometry.layer_scale:
        return x
    return o.multiply(x, o.weight(f"{of.prefix}{LAYER_SCALE}", 1), of.output)


def attend(o: Operations[X], of: Block, x: X, residual: Sequence[X]) -> X:
    """The first half of a block. It returns ``residual`` plus the output of attention or of a
    convolution."""
    name = f"{of.prefix}attended"
    hidden = of.geometry.hidden_size
    if of.kind == CONVOLUTION:
        gated = [Linear(f"{of.prefix}conv.in_proj", 3 * hidden)]
        given = o.product(x, gated, f"{of.prefix}gates", of.norm("input_layernorm"))
        attended = o.convolution(given, of, f"{of.prefix}convolved")
        layer = [Linear(f"{of.prefix}conv.out_proj", hidden)]
    elif of.kind == DELTA:
        attended = _delta_rule(o, of, x)
        layer = [Linear(f"{of.prefix}linear_attn.out_proj", hidden)]
    else:
        attended = _attention(o, of, x)
        if of.geometry.factors:
            attended = o.times(attended, f"{of.prefix}{ATTENTION_OUTPUT}", 1, f"{of.prefix}scaled")
        if of.geometry.attention_gate:
            width = of.geometry.num_heads * of.geometry.head_dim
            gates = [Linear(f"{of.prefix}self_attn.q_gate_proj", width, of.geometry.qkv_bias)]
            gate = o.product(x, gates, f"{of.prefix}gate", of.norm("input_layernorm"))
            attended = o.scale(attended, gate, f"{of.prefix}gated_attention")
        layer = [Linear(f"{of.prefix}self_attn.o_proj", hidden, of.geometry.output_bias)]
    if of.kind == BESIDE:
        ruled = _delta_rule(o, of, x)
        if of.geometry.factors:
            ruled = o.times(ruled, f"{of.prefix}{SPACE_OUTPUT}", 1, f"{of.prefix}ruled_scaled")
        beside = [Linear(f"{of.prefix}linear_attn.out_proj", hidden)]
        residual = [o.product(ruled, beside, f"{of.prefix}beside", residual=residual)]
    if not of.geometry.norm_behind:
        return o.product(attended, layer, name, residual=residual)
    added = o.norm(o.product(attended, layer, name), of.norm("post_self_attn_layernorm"))
    return o.add(residual, added, f"{of.prefix}joined")


def _delta_rule(o: Operations[X], of: Block, x: X) -> X:
    """The gated delta rule or the state space of a block, up to the input of its output
    projection."""
    rule = of.geometry.delta
    assert rule is not None
    prefix = f"{of.prefix}linear_attn."
    layers = [Linear(f"{prefix}in_{part}_proj", width) for part, width in rule.inputs.items()]
    given = o.product(x, layers, f"{of.prefix}mixed", of.norm("input_layernorm"))
    if of.geometry.factors:
        columns = sum(rule.inputs.values())
        given = o.times(given, f"{of.prefix}{SPACE_INPUTS}", columns, f"{of.prefix}mixed_scaled")
    ruled = o.delta_rule(given, of, f"{of.prefix}ruled")
    if not rule.norm_eps:
        return ruled
    norm = Norm("", rule.norm_eps, groups=rule.key_heads, bare=rule.values // rule.key_heads)
    weight = o.weight(f"{of.prefix}{DELTA_NORM}", rule.values)
    return o.multiply(o.norm(ruled, norm), weight, f"{of.prefix}normed")


def feed_forward(o: Operations[X], of: Block, x: X) -> X:
    """The second half of a block, which processes each token separately. It returns x plus the
    output of an MLP or mixture."""
    if of.mlp == 0:
        return x
    norm = of.norm("post_attention_layernorm") if of.geometry.norm_before else None
    return _feed(o, of, x, norm, x)


def _feed(o: Operations[X], of: Block, x: X, norm: Norm | None, to: X) -> X:
    """The state ``to`` plus the output of the MLP or mixture for x."""
    geometry = of.geometry
    prefix = of.prefix
    behind = geometry.norm_behind
    name = f"{prefix}down" if behind else f"{prefix}out"
    residual = () if behind else (to,)
    experts = geometry.experts
    if experts is None:
        inner, down = _inner(o, of, x, norm)
        added = o.product(inner, [down], name, residual=residual)
    elif experts.beside:
        inner, down = _inner(o, of, x, norm)
        dense = o.norm(o.product(inner, [down], f"{prefix}dense"), of.norm(MLP_NORM))
        mixed = o.mixture(x, of, mixture_of(of), f"{prefix}mixed", of.norm(EXPERTS_NORM), ())
        added = o.add([dense], o.norm(mixed, of.norm(MIXED_NORM)), name)
    else:
        if experts.shared:
            residual = (*residual, _shared(o, of, experts, x, norm))
        added = o.mixture(x, of, mixture_of(of), name, norm, residual)
    if not behind:
        return added
    return o.add([to], o.norm(added, of.norm("post_mlp_layernorm")), f"{prefix}out")


def _inner(o: Operations[X], of: Block, x: X, norm: Norm | None) -> tuple[X, Linear]:
    """The activated values of a block's MLP, and the layer that reads them."""
    geometry = of.geometry
    prefix = of.prefix
    width = of.mlp or geometry.intermediate_size
    gate, up, down = _mlp(f"{prefix}mlp", geometry, width, geometry.mlp_bias)
    if geometry.factors:
        both = o.product(x, [gate, up], f"{prefix}gate_and_up", norm)
        given, inner = o.split(both, [width, width], [f"{prefix}gate_in", f"{prefix}up"])
        given = o.times(given, f"{prefix}{GATE_FACTORS}", 1, f"{prefix}gate_scaled")
        inner = o.times(inner, f"{prefix}{UP_FACTORS}", 1, f"{prefix}up_scaled")
        active = o.scale(given, given, f"{prefix}active")  # silu
        return o.multiply(active, inner, f"{prefix}gated"), down
    if geometry.gated:
        gated = o.product(x, [gate, up], f"{prefix}gated", norm, activation=geometry.activation)
        return gated, down
    return o.activate(o.product(x, [up], f"{prefix}up", norm), of, f"{prefix}active"), down


def _shared(o: Operations[X], of: Block, experts: Experts, x: X, norm: Norm | None) -> X:
    """The output of the shared expert, which every token uses."""
    name = f"{of.prefix}{SHARED}"
    gate, up, down = _mlp(name, of.geometry, experts.shared, experts.bias)
    kind = of.geometry.activation
    gated = o.product(x, [gate, up], f"{name}.gated", norm, activation=kind)
    given = o.product(gated, [down], f"{name}.out")
    if not experts.shared_gate:
        return given
    weight = o.product(x, [Linear(f"{name}_gate", 1)], f"{name}.weight", norm)
    return o.scale(given, weight, f"{name}.weighted")


def mixture_of(of: Block) -> Mixture:
    """The linear layers of a block's mixture."""
    experts = of.geometry.experts
    assert experts is not None
    names = (f"{of.prefix}mlp.experts.{index}" for index in range(experts.count))
    parts = [_mlp(name, of.geometry, experts.size, experts.bias) for name in names]
    router = Linear(f"{of.prefix}{ROUTER}", experts.count, experts.bias)
    mixture = Mixture(router, parts)
    if experts.choice_bias:
        mixture = mixture._replace(bias=f"{of.prefix}{CHOICE_BIAS}")
    if not experts.beside:
        return mixture
    scales = f"{of.prefix}{EXPERT_SCALES}"
    return mixture._replace(router_norm=of.norm(ROUTER_NORM), scales=scales)


def _mlp(name: str, geometry: Geometry, inner: int, bias: bool) -> tuple[Linear, Linear, Linear]:
    """Gate, up and down of an MLP."""
    gate, up = (Linear(f"{name}.{part}_proj", inner, bias) for part in ("gate", "up"))
    return gate, up, Linear(f"{name}.down_proj", geometry.hidden_size, bias)


def _attention(o: Operations[X], of: Block, x: X, attends: bool = True) -> X:
    """The attention of a block, up to the input of its output projection.

    Without ``attends``, only the keys and values of x are written.
    """
    geometry = of.geometry
    prefix = of.prefix
    if geometry.latent:
        return _latent_attention(o, of, geometry.latent, x, attends)
    heads = {"q": geometry.num_heads} if attends else {}
    if of.writes:
        heads |= {"k": geometry.num_kv_heads, "v": geometry.num_kv_heads}
    widths = {part: count * geometry.head_dim for part, count in heads.items()}
    layers = [
        Linear(f"{prefix}self_attn.{part}_proj", width, geometry.qkv_bias)
        for part, width in widths.items()
        if part != "v" or not geometry.keys_as_values
    ]
    has_norm = geometry.norm_before and of.eagle is None
    norm = of.norm("input_layernorm") if has_norm else None
    qkv = o.product(x, layers, f"{prefix}qkv", norm)
    if geometry.qkv_limit:
        qkv = o.limit(qkv, geometry.qkv_limit, f"{prefix}qkv_limited")
    if geometry.value_norm and of.writes:
        qkv = _with_normed_values(o, of, qkv, [layer.outputs for layer in layers])
    if geometry.qk_norm_joint:
        *normed, values = o.split(qkv, [*widths.values()], [f"{prefix}{part}" for part in widths])
        names = [f"self_attn.{part}_norm" for part in widths if part != "v"]
        parts = [o.norm(part, of.norm(one)) for part, one in zip(normed, names, strict=True)]
        qkv = o.concat([*parts, values], f"{prefix}qkv_normed")
    return o.attention(qkv, of, f"{prefix}attention", attends)


def _latent_attention(o: Operations[X], of: Block, latent: Latent, x: X, attends: bool) -> X:
    """Latent attention of a block. Returns the input of the output projection."""
    prefix = f"{of.prefix}self_attn."
    heads = range(of.geometry.num_heads)
    bias = of.geometry.qkv_bias
    widths = {"kv_a": latent.rank, "k_rotary": latent.rotary}
    layers = [Linear(f"{prefix}kv_a_proj", latent.width, bias)]
    if attends and latent.query_rank:
        layers = [Linear(f"{prefix}q_a_proj", latent.query_rank, bias), *layers]
        widths = {"q_a": latent.query_rank} | widths
    norm = of.norm("input_layernorm")
    given = o.product(x, layers, f"{of.prefix}compressed", norm)
    *q, row, key = o.split(given, [*widths.values()], [f"{prefix}{part}" for part in widths])
    row = o.norm(row, of.norm("self_attn.kv_a_layernorm")._replace(eps=LATENT_EPS))
    if not attends:
        qkv = o.concat([row, key], f"{of.prefix}row")
        return o.attention(qkv, of, f"{of.prefix}rows", attends)
    queries = Linear(f"{prefix}q_proj", len(heads) * (latent.plain + latent.rotary))
    if latent.query_rank:
        [x] = q
        queries = queries._replace(name=f"{prefix}q_b_proj")
        norm = of.norm("self_attn.q_a_layernorm")._replace(eps=LATENT_EPS)
    query = o.product(x, [queries], f"{of.prefix}q", norm)
    sizes = [len(heads) * latent.plain, len(heads) * latent.rotary]
    plain, turned = o.split(query, sizes, [f"{prefix}q_plain", f"{prefix}q_rotary"])
    inward = [Linear(f"{prefix}heads.{head}.k_b_proj", latent.rank) for head in heads]
    outward = [Linear(f"{prefix}heads.{head}.v_b_proj", latent.value) for head in heads]
    plain = o.by_heads(plain, inward, f"{of.prefix}q_inward")
    qkv = o.concat([plain, turned, row, key], f"{of.prefix}qkv")
    return o.by_heads(o.attention(qkv, of, f"{of.prefix}rows", attends), outward, f"{of.prefix}v")


def _with_normed_values(o: Operations[X], of: Block, x: X, sizes: Sequence[int]) -> X:
    """Returns queries, keys and normalized values. The columns of x are parts of these sizes. The
    last part is the values, and it may be the keys, too."""
    geometry = of.geometry
    names = [f"{of.prefix}part_{index}" for index in range(len(sizes))]
    parts = o.split(x, sizes, names)
    kept = parts if geometry.keys_as_values else parts[:-1]
    norm = of.norm("values")._replace(groups=geometry.num_kv_heads, bare=geometry.head_dim)
    return o.concat([*kept, o.norm(parts[-1], norm)], f"{of.prefix}qkv_normed")


def _write_exit_caches(o: Operations[X], model: Model, x: X) -> None:
    """Write the keys and values of the exit blocks. The verify graph computes no other part of
    these blocks."""
    last = model.head.blocks - 1
    for index in range(last):
        x = block(o, model.exit_block(index), x)
    if model.head.blocks:
        _attention(o, model.exit_block(last), x, attends=False)


def deep_state(o: Operations[X], model: Model, states: Sequence[X]) -> X:
    """The deep state of tokens, from their hidden states after each deep layer."""
    total: list[X] = []
    for index, x in enumerate(states):
        prefix = f"{EXIT_HEAD}deep.{index}."
        layer = [Linear(f"{prefix}state_proj", model.state_width)]
        norm = model.head_norm(f"deep.{index}.norm")
        total = [o.product(x, layer, f"{prefix}state", norm, residual=total)]
    return total[0]


def deep_in(o: Operations[X], model: Model, state: X) -> X:
    """The term that a deep state adds after the head's last attention."""
    return o.product(state, [Linear(f"{EXIT_HEAD}{DEEP_IN}", model.geometry.hidden_size)], "more")


def _write_eagle(o: Operations[X], model: Model, embedded: X, states: Sequence[X]) -> None:
    """Write the fused states of an EAGLE-3 head (arXiv 2503.01840), and its keys and values."""
    eagle = model.head.eagle
    assert eagle is not None
    norms = [model.head_norm(f"{FUSE_NORM}.{index}") for index in range(eagle.fuse_norms)]
    parts = list(states)
    norm = None
    if len(norms) > 1:
        parts = [o.norm(part, one) for part, one in zip(parts, norms, strict=True)]
    elif norms:
        [norm] = norms
    layer = [Linear(f"{EXIT_HEAD}{FUSE}", model.geometry.hidden_size)]
    fused = o.product(o.concat(parts, "states"), layer, "fused", norm)
    state = o.parent_state("before", o.write_state(fused, "written"))
    read, _ = _eagle_inputs(o, model, eagle, embedded, state)
    _attention(o, model.exit_block(0), read, attends=False)


def _eagle_inputs(
    o: Operations[X], model: Model, eagle: Eagle, embedded: X, state: X
) -> tuple[X, X]:
    """The input of an EAGLE-3 head's attention, and the residual of its block."""
    of = model.exit_block(0)
    normed_embedded = o.norm(embedded, of.norm("input_layernorm"))
    normed = o.norm(state, of.norm("hidden_norm"))
    read = o.concat([normed_embedded, normed], "read")
    return read, normed if eagle.normed_residual else state


def _eagle_features(o: Operations[X], model: Model, eagle: Eagle, embedded: X) -> X:
    """The input of the LM head of an EAGLE-3 head. Writes the state of each token."""
    state = o.parent_state("before")
    read, residual = _eagle_inputs(o, model, eagle, embedded, state)
    of = model.exit_block(0)
    x = feed_forward(o, of, attend(o, of, read, [residual]))
    features = o.norm(x, model.head_norm("norm"))
    o.write_state(features if eagle.normed_output else x, "written")
    return features
