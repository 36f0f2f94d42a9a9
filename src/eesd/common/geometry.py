"""Sizes and options of a decoder and of its exit head.

``config.json`` is parsed into these objects, and ``manifest.json`` stores them. The module needs no
torch.
"""

from dataclasses import dataclass, replace
from math import inf

from eesd.common.checks import first_fault
from eesd.common.errors import EESDError
from eesd.common.prior import CalibrationPrior


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies, by a rule that does not depend on the length of the text.

    Attributes:
        kind: One of ``linear``, ``llama3``, ``yarn``, ``longrope`` and ``proportional``. The last
            one uses only the first of the frequencies of whole heads.
        factor: Factor by which the scaling extends the length of texts.
        original_max_position: Number of positions of the model before the scaling (llama3, yarn).
        low_freq_factor: Frequencies that turn fewer times than this over the original positions are
            scaled (llama3).
        high_freq_factor: Frequencies that turn more often than this are not scaled (llama3).
        beta_fast: Dimensions that turn more often than this are not scaled (yarn).
        beta_slow: Dimensions that turn less often than this are scaled (yarn).
        attention_factor: Factor of cos and sin (yarn, longrope).
        truncate: Whether the bounds of the dimensions between ``beta_fast`` and ``beta_slow`` are
            rounded to integers (yarn).
        divisors: Divisor of each frequency. The divisors are for texts within the original
            positions (longrope).
    """

    kind: str
    factor: float
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


FULL = "full"
SLIDING = "sliding"
UNROTATED = "unrotated"
CONVOLUTION = "convolution"
DELTA = "delta"
BESIDE = "beside"
"""Kinds of layers. FULL layers have a rotary embedding, and attend to all previous tokens. SLIDING
layers attend to the tokens within a window. They use the local rotary base if there is one.
UNROTATED layers are like FULL layers without the rotary embedding. CONVOLUTION layers have a short
convolution instead of attention, and DELTA layers have the gated delta rule or a state space
instead. BESIDE layers add the outputs of a rotated full attention and of a state space."""
RECURRENT = (CONVOLUTION, DELTA)
"""Kinds of layers whose caches hold states instead of keys and values."""
RULED = (DELTA, BESIDE)
"""Kinds of layers with the gated delta rule or a state space."""
GATES = ("silu", "gelu_tanh", "clamped")
"""Activations of an MLP's gate. ``clamped``, of gpt-oss, limits gate and up, and adds 1 to up."""
PLAIN = ("relu2", "xielu", "gelu_tanh")
"""Activations of an MLP without a gate. xielu (arXiv 2411.13010) has two parameters in each
block."""
SCORES = ("softmax", "sigmoid", "sparsemixer")
"""Functions that give the scores of experts from the router's logits. ``sparsemixer`` (arXiv
2409.12136) gives the share of an expert's logit among the logits near it. Experts that were chosen
before do not count."""
MOST_LAYERS = 4096
WIDEST = 512
WIDEST_LATENT = 576
LARGEST_SIZE = 1 << 24
MOST_TAPS = 16
"""Bounds on the values in a file, so that a damaged file cannot exhaust the memory."""


@dataclass(frozen=True)
class Experts:
    """Layers with a mixture of MLPs, which are called experts. Each token uses a few of the
    experts.

    Attributes:
        count: Number of experts per layer.
        used: Number of experts that a token uses.
        size: Intermediate size of an expert.
        normed: Whether the weights of a token's experts are divided by their sum.
        dense_layers: Indices of the layers that have one MLP of the model's intermediate size
            instead of experts, in ascending order. The list may include layers beyond the last.
        shared: Intermediate size of an MLP that every token uses in addition to its experts, or 0
            if there is no such MLP.
        shared_gate: Whether the output of that MLP is multiplied by a gate of one number.
        bias: Whether the router and the experts have biases.
        beside: Whether an MLP of the model's intermediate size runs next to the mixture. The router
            then has a separate norm, each expert has a factor, and norms follow both.
        scores: One of :data:`SCORES`. The scores of a token's experts are the experts' weights.
        choice_bias: Whether each expert has a bias that is added to its score when experts are
            chosen, but not to its weight.
        groups: Number of equal groups of consecutive experts. All experts of a token are in a few
            of the groups.
        used_groups: Number of groups that a token uses. These are the groups with the largest sums
            of their ``group_best`` largest scores, including biases.
        group_best: Number of scores in these sums.
        norm_eps: Number that is added to the sum by which weights are divided.
        scale: Factor of the weights.
        margin: Largest distance of a logit that counts for sparsemixer, relative to the larger of
            its absolute value and the chosen logit.

    Raises:
        ValueError: A value is out of range.
    """

    count: int
    used: int
    size: int
    normed: bool
    dense_layers: tuple[int, ...] = ()
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    beside: bool = False
    scores: str = "softmax"
    choice_bias: bool = False
    groups: int = 1
    used_groups: int = 1
    group_best: int = 1
    norm_eps: float = 0.0
    scale: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        _check_size("the number of experts", self.count, MOST_LAYERS)
        _check_size("the size of the shared expert", self.shared, LARGEST_SIZE, least=0)
        _check_size("the number of experts that a token uses", self.used, self.count)
        _check_size("the size of the experts", self.size, LARGEST_SIZE)
        if list(self.dense_layers) != sorted({*self.dense_layers} & {*range(MOST_LAYERS)}):
            raise ValueError("the layers without experts must ascend")
        if self.scores not in SCORES:
            raise ValueError(f"the scores of experts must be one of {', '.join(SCORES)}")
        _check_size("the number of groups of experts", self.groups, self.count)
        if self.count % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.count} experts")
        size = self.count // self.groups
        _check_size("the number of groups that a token uses", self.used_groups, self.groups)
        _check_size("the number of scores that rank a group", self.group_best, size)
        _check_size("the number of experts that a token uses", self.used, self.used_groups * size)
        if self.scores == "sparsemixer" and (self.choice_bias or self.groups > 1):
            raise ValueError("sparsemixer has neither biases nor groups")
        if not (0 <= self.norm_eps <= 1 and 1e-6 <= self.scale <= 1e6 and 0 <= self.margin <= 1):
            raise ValueError("the factor of the experts' weights is out of range")

    def on_rank(self, ranks: int) -> "Experts":
        """The experts on each rank, if every rank has an equal part of each expert."""
        return replace(self, size=self.size // ranks, shared=self.shared // ranks)


@dataclass(frozen=True)
class DeltaRule:
    """Sizes of layers with the gated delta rule (arXiv 2412.06464) or a state space (Mamba-2, arXiv
    2405.21060).

    Attributes:
        key_heads: Number of query heads, which is also the number of key heads. A state space calls
            them groups.
        value_heads: Number of value heads. It is a multiple of ``key_heads``. Each has a matrix
            [key_dim, value_dim] as its state.
        key_dim: Size of a head's query, and of its key.
        value_dim: Size of a head's value.
        taps: Number of tokens that the convolution sees, including the current token.
        space: Whether it is a state space. Then queries and keys are not normalized, a token's
            delta is its value times its step, and each head adds a multiple of its value to its
            output.
        conv_bias: Whether the convolution has biases.
        norm_eps: Epsilon of the norm that follows the gate of a state space, or 0 if there is no
            norm. The columns of each key head's values are normalized separately.

    Raises:
        ValueError: A value is out of range.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    space: bool = False
    conv_bias: bool = False
    norm_eps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"the epsilon of a state space is {self.norm_eps}")
        _check_size("the number of key heads of the delta rule", self.key_heads, MOST_LAYERS)
        _check_size("the number of value heads of the delta rule", self.value_heads, MOST_LAYERS)
        for size in (self.key_dim, self.value_dim):
            _check_size("the size of the delta rule's heads", size, WIDEST)
        _check_size("the convolution of the delta rule", self.taps, MOST_TAPS)
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.key_heads} key heads of the delta rule do not divide its "
                f"{self.value_heads} value heads"
            )

    @property
    def keys(self) -> int:
        """Number of columns of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of columns of all values."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Number of columns that are convolved. They are the queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def inputs(self) -> dict[str, int]:
        """Number of columns of each input. The inputs are the columns that are convolved, the gates
        of the outputs, the step sizes, and the decays. A state space has one number for the last
        two."""
        steps = {} if self.space else {"b": self.value_heads}
        return {"qkv": self.mixed, "z": self.values, **steps, "a": self.value_heads}

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Number of columns of each part of a token's state in its slot. The parts are the inputs
        of the convolution, the convolved keys, the deltas of the values, and the logarithms of the
        decays."""
        return self.mixed, self.keys, self.values, self.value_heads


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention (arXiv 2405.04434). Its cache has one compressed row for each
    token.

    Attributes:
        query_rank: Size of a token's compressed queries, or 0 if queries are not compressed.
        rank: Size of a token's compressed keys and values, from which all heads compute theirs.
        plain: Size of the part of a head's query and key that is not rotated.
        rotary: Size of the rotated part. All heads have the same rotated key.
        value: Size of a head's value.

    Raises:
        ValueError: A value is out of range.
    """

    query_rank: int
    rank: int
    plain: int
    rotary: int
    value: int

    def __post_init__(self) -> None:
        _check_size("q_lora_rank", self.query_rank, LARGEST_SIZE, least=0)
        for name, size in (("qk_nope", self.plain), ("qk_rope", self.rotary), ("v", self.value)):
            _check_size(f"{name}_head_dim", size, WIDEST)
        _check_size("kv_lora_rank", self.rank, WIDEST_LATENT - self.rotary)
        if self.rotary % 2:
            raise ValueError(f"qk_rope_head_dim is {self.rotary}, and must be even")

    @property
    def width(self) -> int:
        """Size of a token's row in the cache. The row is the compressed part, followed by the
        rotated key."""
        return self.rank + self.rotary

    @property
    def half(self) -> int:
        """Half of a row, rounded up to an even size. This is the size of a head in the cache."""
        return -(-self.width // 4) * 2


@dataclass(frozen=True)
class Geometry:
    """All properties that the modules of a decoder depend on. The defaults are Llama's values.

    Attributes:
        architecture: Name of the architecture in transformers. It is not used in computations.
        qk_norm: Whether queries and keys are normalized, each head separately, before they are
            rotated.
        qk_norm_rotated: Whether queries and keys are normalized after the rotation instead.
        qk_norm_joint: Whether queries and keys are each normalized over all heads together instead.
        norm_before: Whether a norm precedes attention and MLP.
        norm_behind: Whether a norm follows attention and MLP, before their output is added to x.
        centred_norms: Whether norms are LayerNorms, which subtract the mean, instead of RMSNorms.
        norm_bias: Whether norms add a bias.
        parallel: Whether attention and MLP read the same normalized x, and both outputs are added
            to x. The blocks of an exit head run attention and MLP one after the other.
        wide_norms: Whether norms have float32 weights and multiply in float32, whatever the
            directory's element type.
        gated: Whether the MLP multiplies an activated gate by another projection.
        activation: One of :data:`GATES`, or one of :data:`PLAIN` if the MLP has no gate.
        embedding_scale: Factor of the embeddings.
        attention_scale: Factor of the scores. If it is 0, the factor is D ** -0.5.
        attention_cap: If it is not 0, each score s becomes ``cap * tanh(s / cap)``. If it is 0,
            there is no cap.
        sinks: Whether each head has a sink, which is an extra score whose value vector is 0.
        attention_gate: Whether the output of attention is multiplied by the sigmoid of a gate.
        logit_cap: Cap of the model's logits, which works like the cap of the scores. The exit head
            has no cap because it learns to predict the capped logits.
        rotated: Number of values that are rotated in each half of a head, counted from its
            beginning. If it is 0, all values are rotated.
        layer_kinds: Kind of each layer. If it is empty, all layers are ``full``. The list may have
            more layers than the model.
        window: Number of tokens that a sliding layer sees, including the current token.
        taps: Number of tokens that a short convolution sees, including the current token.
        delta: Sizes of layers with the gated delta rule or a state space.
        latent: Sizes of latent attention, which replaces the attention of all layers. Each cache
            then has one KV head. A token's row is its keys, followed by its values.
        local_theta: Base of the frequencies in sliding layers. These frequencies are not scaled. If
            the base is 0, sliding layers have the same frequencies as other layers.
        experts: Mixture of experts that replaces the MLPs of layers. Blocks of an exit head keep
            MLPs.
        full_heads: Number of KV heads and head size of full layers. If it is empty, these layers
            have ``num_kv_heads`` and ``head_dim``, which are always the sizes of the caches. A
            larger head takes the place of several cache heads.
        sliding_heads: Number of KV heads and head size of sliding layers, with the same rules.
        value_norm: Whether the values of each head are normalized, without weights.
        keys_as_values: Whether full layers have no value projection. Their values are then the keys
            before the norm.
        shared_from: Index of the first layer without keys and values. This layer and all later
            layers read the keys and values of the last layer of their kind before this index. If it
            is 0, there are no such layers.
        shared_size: Intermediate size of these layers. If it is 0, they have the size of the other
            layers.
        input_size: Number of columns of the input that each layer gets from the token, or 0 if
            there is no such input.
        input_layers: Number of layers in the table of these inputs.
        layer_scale: Whether a factor multiplies the output of each layer.
        factors: Whether factors multiply the inputs of state spaces, the inputs of output
            projections, and the gates and up projections of MLPs, whose activation is silu.
        qkv_limit: Limit of the absolute values of queries, keys and values, or 0 if there is no
            limit.
        logit_bias: Whether the logits have biases. A trained exit head learns to predict the logits
            without biases of its own.

    Raises:
        ValueError: A value is out of range, or does not fit the others.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_rotated: bool = False
    qk_norm_joint: bool = False
    norm_before: bool = True
    norm_behind: bool = False
    centred_norms: bool = False
    norm_bias: bool = False
    parallel: bool = False
    wide_norms: bool = False
    gated: bool = True
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    sinks: bool = False
    attention_gate: bool = False
    logit_cap: float = 0.0
    rotated: int = 0
    layer_kinds: tuple[str, ...] = ()
    window: int = 0
    taps: int = 0
    delta: DeltaRule | None = None
    latent: Latent | None = None
    local_theta: float = 0.0
    experts: Experts | None = None
    full_heads: tuple[int, ...] = ()
    sliding_heads: tuple[int, ...] = ()
    value_norm: bool = False
    keys_as_values: bool = False
    shared_from: int = 0
    shared_size: int = 0
    input_size: int = 0
    input_layers: int = 0
    layer_scale: bool = False
    factors: bool = False
    qkv_limit: float = 0.0
    logit_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            _check_size(
                name,
                getattr(self, name),
                {"num_layers": MOST_LAYERS, "head_dim": WIDEST}.get(name, LARGEST_SIZE),
            )
        _check_size("vocab_size", self.vocab_size, LARGEST_SIZE, least=2)
        if fault := first_fault(
            {
                f"{self.num_kv_heads} key-value heads do not divide {self.num_heads} heads": (
                    not self.own_heads and self.num_heads % self.num_kv_heads
                ),
                f"head_dim is {self.head_dim}, and must be even for rotary embeddings": (
                    self.head_dim % 2
                ),
                f"rms_norm_eps is {self.rms_norm_eps}, and must be at least 0 and below 1": (
                    not 0 <= self.rms_norm_eps < 1
                ),
                f"rope_theta is {self.rope_theta}, and must be above 0": (
                    not 0 < self.rope_theta < inf
                ),
            }
            | self._faults_of_parts()
        ):
            raise ValueError(fault)

    def _faults_of_parts(self) -> dict[str, bool]:
        """Returns messages about the options that Llama does not use, and whether each of these
        faults is present."""
        kinds = {*self.layer_kinds}
        activations = GATES if self.gated else PLAIN
        scales = (
            *("embedding_scale", "attention_scale", "attention_cap", "logit_cap", "local_theta"),
            "qkv_limit",
        )
        return {
            f"activation is {self.activation[:40]!r}, and must be one of "
            f"{', '.join(activations)}": self.activation not in activations,
            **{
                f"{name} is {getattr(self, name)}, and must be between 0 and 1e9": (
                    not 0 <= getattr(self, name) <= 1e9
                )
                for name in scales
            },
            f"{2 * self.rotated} of a head's {self.head_dim} values cannot be rotated": (
                not 0 <= 2 * self.rotated <= (self.full_heads or (0, self.head_dim))[1]
            ),
            f"there are kinds of {len(self.layer_kinds)} layers, and {self.num_layers} layers": (
                0 < len(self.layer_kinds) < self.num_layers
            ),
            "a kind of layer is unknown": (
                not kinds <= {FULL, SLIDING, UNROTATED, BESIDE, *RECURRENT}
                or len(self.layer_kinds) > MOST_LAYERS
            ),
            f"the window is {self.window}, which does not fit the kinds of layers": (
                (SLIDING in kinds) != (self.window > 0)
            ),
            f"a convolution of {self.taps} tokens is out of range": (
                (CONVOLUTION in kinds) != (self.taps > 0) or self.taps > MOST_TAPS
            ),
            "the sizes of the delta rule do not fit the kinds of layers": (
                bool(kinds & {*RULED}) != (self.delta is not None)
                or (self.delta is not None and CONVOLUTION in kinds)
            ),
            "a state is too large for the caches": (
                bool(kinds & {*RECURRENT, BESIDE}) and self.state_caches > WIDEST
            ),
            "the heads of a kind of layer do not fit the caches": not self._heads_fit(),
            "latent attention does not fit the caches or the other parts": not self._latent_fits(),
            "no layer has the keys and values of one that shares them": not self._shares_fit(),
            "the inputs of layers are out of range": (
                not 0 <= self.input_size <= LARGEST_SIZE
                or not 0 <= self.shared_size <= LARGEST_SIZE
                or not 0 <= self.input_layers <= MOST_LAYERS
                or (self.input_size > 0) != (self.input_layers >= self.num_layers)
            ),
            "a block has no norm": not (self.norm_before or self.norm_behind),
            "experts have gates, and no biases": (
                self.experts is not None and (self.mlp_bias or not self.gated)
            ),
            "only norms that subtract the mean have biases": (
                self.norm_bias and not self.centred_norms
            ),
            "norms of queries and keys that subtract the mean are not supported": (
                self.centred_norms and (self.qk_norm or self.qk_norm_joint)
            ),
            "only MLPs with silu and without biases have factors": (
                self.factors and (self.activation != "silu" or self.mlp_bias or not self.gated)
            ),
            "attention and MLP side by side have one norm, before both": (
                self.parallel and (self.norm_behind or not self.norm_before)
            ),
        }

    def _heads_fit(self) -> bool:
        columns = self.num_kv_heads * self.head_dim
        return all(
            len(heads) == 2
            and 0 < heads[0] <= self.num_heads
            and self.num_heads % heads[0] == 0
            and 0 < heads[1] <= WIDEST
            and heads[1] % self.head_dim == 0
            and heads[0] * heads[1] <= columns
            for heads in self.own_heads
        )

    def _latent_fits(self) -> bool:
        latent = self.latent
        if latent is None:
            return True
        others = (
            *(self.attention_cap, self.rotated, self.own_heads, self.sinks, self.attention_gate),
            *(self.qk_norm, self.qk_norm_joint, {*self.layer_kinds} - {FULL}),
        )
        sizes = (self.num_kv_heads, self.head_dim)
        return sizes == (1, latent.half) and self.attention_scale > 0 and not any(others)

    def _shares_fit(self) -> bool:
        if not self.shared_from:
            return True
        owners = {*self.layer_kinds[: self.shared_from]}
        return 0 < self.shared_from <= len(self.layer_kinds) and owners >= {*self.layer_kinds}

    def check_window(self, nodes: int) -> None:
        """Raise ValueError unless the window is longer than a round with this number of drafted
        nodes. The whole round must fit in it."""
        if 0 < self.window <= nodes:
            raise ValueError(
                f"the window of {self.window} tokens is not longer than a round of {nodes} "
                "drafted nodes"
            )

    def kind(self, layer: int) -> str:
        """Kind of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else FULL

    @property
    def own_heads(self) -> list[tuple[int, ...]]:
        """The head sizes of those kinds of layers that differ from the caches."""
        return [heads for heads in (self.full_heads, self.sliding_heads) if heads]

    def shares(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another layer."""
        return 0 < self.shared_from <= layer

    @property
    def has_stages(self) -> bool:
        """Whether the verify graph can be split into stages. This requires that no layer needs more
        of an earlier layer than its hidden states."""
        return not self.shared_from and not self.input_size

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention and caches."""
        return [
            one
            for one in range(self.num_layers)
            if self.kind(one) not in RECURRENT and not self.shares(one)
        ]

    def head_layers(self, blocks: int) -> list[int]:
        """The layers from which an untrained exit head copies the weights and kinds of its blocks.
        These are the last ``blocks`` layers with attention. The model must have that many of these
        layers."""
        layers = self.attention_layers
        return layers[len(layers) - blocks :]

    @property
    def state_size(self) -> int:
        """Number of values in a token's state in a recurrent layer."""
        return self.hidden_size if self.delta is None else sum(self.delta.parts)

    @property
    def state_caches(self) -> int:
        """Number of caches for the states of a recurrent layer."""
        return self.caches_for(self.state_size)

    def caches_for(self, size: int) -> int:
        """Number of caches for states of this size."""
        return -(-size // self.cache_columns)

    def caches_of(self, layer: int) -> range:
        """Indices of a layer's caches. A layer has one cache of keys and values, or several caches
        of states, or both in this order. A layer that reads another layer's keys and values has
        that layer's caches."""
        if self.shares(layer):
            kinds = self.layer_kinds[: self.shared_from]
            layer = self.shared_from - 1 - kinds[::-1].index(self.kind(layer))
        first = sum(self._caches_of_kind(one) for one in self.layer_kinds[:layer])
        if not self.layer_kinds:
            first = layer
        return range(first, first + self._caches_of_kind(self.kind(layer)))

    def _caches_of_kind(self, kind: str) -> int:
        states = self.state_caches if kind in (*RECURRENT, BESIDE) else 0
        return states + (kind not in RECURRENT)

    @property
    def num_caches(self) -> int:
        """Number of caches of the base layers."""
        owners = min(self.num_layers, self.shared_from or self.num_layers)
        return self.caches_of(owners - 1).stop

    @property
    def cache_columns(self) -> int:
        """Number of values in a slot of a cache. The values are the keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def dense(self) -> "Geometry":
        """The geometry of blocks without experts, such as an exit head's blocks."""
        return replace(self, experts=None)

    def of_head(self, layer: int) -> "Geometry":
        """The geometry of an exit head's block that is modelled on a layer. The block has no
        experts, and its MLP runs after attention."""
        own = self.of_layer(layer)
        return replace(
            own, experts=None, parallel=False, input_size=0, input_layers=0, layer_scale=False
        )

    def of_layer(self, layer: int) -> "Geometry":
        """The geometry of a layer's block. It has the layer's head sizes, and has experts only if
        the layer has them."""
        own = self.of_kind(self.kind(layer))
        if self.shares(layer) and self.shared_size:
            own = replace(own, intermediate_size=self.shared_size)
        return own.dense if own.experts and layer in own.experts.dense_layers else own

    def of_kind(self, kind: str) -> "Geometry":
        """The geometry with the head sizes of a kind of layer."""
        if not self.own_heads:
            return self
        heads = self.sliding_heads if kind == SLIDING else self.full_heads
        kv_heads, size = heads or (self.num_kv_heads, self.head_dim)
        return replace(
            self,
            num_kv_heads=kv_heads,
            head_dim=size,
            full_heads=(),
            sliding_heads=(),
            keys_as_values=self.keys_as_values and kind == FULL,
            rotated=self.rotated if kind == FULL else 0,
        )

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotary_columns(self) -> int:
        """Number of columns of the rotary tables. There is one column for every two values of a
        head. If sliding layers have a separate base, they have further columns."""
        kinds = (FULL, SLIDING) if self.local_theta else (FULL,)
        return sum(self.of_kind(kind).rotary_dim // 2 for kind in kinds)

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that the rotary tables describe."""
        return self.latent.rotary if self.latent else self.head_dim

    def on_rank(self, ranks: int) -> "Geometry":
        """The geometry of each rank of a split model. Raises :class:`EESDError` if the ranks cannot
        have equal parts."""
        experts = self.experts
        parts = {"key-value heads": self.num_kv_heads, "columns of the MLP": self.intermediate_size}
        if experts is not None:
            parts["columns of an expert"] = experts.size
            parts["columns of the shared expert"] = experts.shared
        unsplit = {
            "norms over all heads": self.qk_norm_joint,
            "short convolutions": self.taps,
            "the gated delta rule or a state space": self.delta,
            "gated attention": self.attention_gate,
            "attention sinks": self.sinks,
            "latent attention": self.latent,
            "layers of different sizes": self.own_heads or self.shared_from,
            "inputs of layers": self.input_size,
            "factors of projections": self.factors,
            "an MLP next to experts": experts is not None and experts.beside,
        }
        part = next((part for part, has in unsplit.items() if has), None)
        if ranks > 1 and part:
            raise EESDError(
                f"{self.architecture} cannot be split over ranks: it has {part}; start one process."
            )
        for what, size in parts.items():
            if size % ranks:
                raise EESDError(
                    f"{ranks} ranks do not divide the model's {size} {what}; give another number."
                )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            experts=experts and experts.on_rank(ranks),
        )


def _check_size(name: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:20]}, and must be between {least} and {most}")


@dataclass(frozen=True)
class Eagle:
    """Structure of an EAGLE-3 head (arXiv 2503.01840). The head reads states of the model. For
    drafted tokens, it reads states that it computed itself.

    Attributes:
        layers: Indices of the layers whose hidden states the verify graph fuses for the head, in
            ascending order.
        block: Sizes of the head's block. Attention reads an embedding and a state side by side. All
            caches have one shape, so the hidden size, the number of KV heads and the head size
            equal the model's.
        normed_residual: Whether the residual of the block is the norm of the state instead of the
            state.
        fuse_norms: Number of norms before the states are fused. It is 0, 1 (a norm over all states
            side by side), or one for each layer (EAGLE-3.1).
        normed_output: Whether the next draft step reads the norm of the block's output instead of
            the output (EAGLE-3.1).
    """

    layers: tuple[int, ...]
    block: Geometry
    normed_residual: bool = False
    fuse_norms: int = 0
    normed_output: bool = False


@dataclass(frozen=True)
class ExitConfig:
    """Position and structure of a drafting head, which is an exit head or an EAGLE-3 head.

    Attributes:
        layer: The number of base layers before the head, N. If N = L and E = 0, the draft is the
            whole model, with weights of fewer bits.
        blocks: The number of decoder blocks in the head, E. If it is 0, the norm and the LM head
            follow layer N directly, as in models trained with LayerSkip.
        own_lm_head: Whether the head has a separate LM head, instead of using the base model's. In
            an engine directory, a head with a draft vocabulary always needs a separate LM head,
            which has a row for each token of that vocabulary.
        base: Fingerprint of the base model.
        trained: Whether the head was trained. It is False for a head that was only initialised. An
            untrained head without blocks is a placeholder that is not worth running.
        calibration: Calibration prior of this head. If it is None, the controllers use their
            default prior.
        draft_vocab: The number of tokens that the head can predict, Vd. If it is 0, the head can
            predict the whole vocabulary.
        deep: Indices of the layers above N whose hidden states the verify graph writes to the deep
            cache for the draft, in ascending order. It is empty if there is no deep cache.
        mlp: Width of the blocks' MLPs. If it is 0, they have no MLP. If it is None, they have the
            width of the model's MLPs.
        eagle: Structure of an EAGLE-3 head, or None for an exit head. An EAGLE-3 head has one block
            and a separate LM head, and follows right after the embeddings (N = 0).
    """

    layer: int
    blocks: int = 1
    own_lm_head: bool = False
    base: str = ""
    trained: bool = False
    calibration: CalibrationPrior | None = None
    draft_vocab: int = 0
    deep: tuple[int, ...] = ()
    mlp: int | None = None
    eagle: Eagle | None = None

    @property
    def can_draft(self) -> bool:
        """Whether the draft graph is more than a placeholder."""
        return self.trained or self.blocks > 0

    def is_whole(self, geometry: Geometry) -> bool:
        """Whether the draft is the whole model."""
        return self.layer == geometry.num_layers and self.blocks == 0

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers after which the verify graph writes states for the head, in ascending
        order."""
        return self.eagle.layers if self.eagle else self.deep


def head_fault(geometry: Geometry, exit_config: ExitConfig) -> str | None:
    """The reason why a model cannot have this head, or None if it can."""
    deep = exit_config.deep
    eagle = exit_config.eagle
    if list(deep) != sorted(set(deep)) or not all(
        exit_config.layer < layer <= geometry.num_layers for layer in deep
    ):
        return (
            f"deep layers must ascend, from {exit_config.layer + 1} to at most "
            f"{geometry.num_layers}"
        )
    if exit_config.mlp is not None and not 0 <= exit_config.mlp <= LARGEST_SIZE:
        return f"its MLP is {exit_config.mlp} wide"
    if deep and not exit_config.blocks:
        return "a head without blocks has no attention after which they could be added"
    if eagle is None:
        return None
    for name in ("hidden_size", "num_kv_heads", "head_dim", "vocab_size"):
        own = getattr(eagle.block, name)
        models = getattr(geometry, name)
        if own != models:
            return f"its {name} is {own}, and the model's is {models}"
    layers = eagle.layers
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not all(1 <= layer <= geometry.num_layers for layer in layers)
    ):
        return (
            f"it reads states after the layers {', '.join(map(str, layers))}; they must ascend, "
            f"from 1 to {geometry.num_layers}"
        )
    if eagle.fuse_norms not in (0, 1, len(layers)):
        return f"it has {eagle.fuse_norms} norms for the states of {len(layers)} layers"
    if (exit_config.layer, exit_config.blocks, exit_config.own_lm_head, deep) != (0, 1, True, ()):
        return "it must have one block and its own LM head"
    return None


def state_caches(geometry: Geometry, exit_config: ExitConfig) -> int:
    """Number of caches that hold a head's states. These are the deep cache, or the state caches of
    an EAGLE-3 head."""
    if exit_config.eagle:
        return geometry.caches_for(geometry.hidden_size)
    return int(bool(exit_config.deep))


def draft_columns(geometry: Geometry, exit_config: ExitConfig) -> int:
    """Number of columns of the draft's logits. It is the size of the draft vocabulary, or V without
    one."""
    return exit_config.draft_vocab or geometry.vocab_size


def exit_caches(geometry: Geometry, exit_config: ExitConfig) -> range:
    """Indices of the exit head's caches, which follow the base layers' caches. The caches of its E
    blocks come first, then its state caches."""
    first = geometry.num_caches
    states = state_caches(geometry, exit_config)
    return range(first, first + exit_config.blocks + states)


def draft_caches(geometry: Geometry, exit_config: ExitConfig) -> list[int]:
    """Indices of the caches that the draft uses. They belong to the first N layers and to the exit
    head."""
    layers = range(exit_config.layer)
    own = [cache for layer in layers for cache in geometry.caches_of(layer)]
    return [*dict.fromkeys(own), *exit_caches(geometry, exit_config)]
