"""The drafters of a sequence, the options with which users choose drafters, and the functions that
make drafters.

To add a drafter, write a function that adds it to a :class:`Drafting`, and a line in
:data:`DRAFTERS`. Rounds, trees, statistics and the guard's accounts refer to drafters by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from eesd.common.checks import check_choice, check_flag, check_integer, check_type
from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.common.manifest import MAX_TREE_NODES, Manifest
from eesd.controllers import Controller, make_controller
from eesd.controllers.base import EXIT, TEXT
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Engine


@dataclass(frozen=True)
class Drafter:
    """Drafts level by level, with an engine.

    Attributes:
        engine: The draft engine.
        controller: Decides after each level whether to draft another one.
        tree_width: Number of nodes per level. It is 1 for a chain.
        budget: The budget that chooses the nodes to verify. If it is None, all nodes are verified.
        columns: Tokens of the columns of the draft's logits.
        name: Its name in statistics, reports and the guard's accounts.
    """

    engine: Engine
    controller: Controller
    tree_width: int = 1
    budget: TreeBudget | None = None
    columns: DraftColumns = WHOLE
    name: str = EXIT


@dataclass(frozen=True)
class Drafting:
    """The drafters of a sequence, and the rules that they share. A sequence without a drafter
    decodes plainly.

    Attributes:
        drafter: The drafter that runs an engine, or None if there is no such drafter.
        text: Decides how many of the text's proposed tokens are verified. None if the text does not
            draft.
        guard: Pauses a drafter that loses time. None if no drafter is ever paused.
        value: The costs and the worth of rounds, which the controller, the budget and the text rule
            use. It is None if no rule needs them.
        fixed: Whether rounds must draft and verify the same tokens each time. This is so with
            rejection sampling, because the text then depends on the drafted tokens.
    """

    drafter: Drafter | None = None
    text: TextRule | None = None
    guard: Guard | None = None
    value: RoundValue | None = None
    fixed: bool = False

    @cached_property
    def rules(self) -> list[Controller | TreeBudget | TextRule]:
        """Those of the controller, the budget and the text rule that are not None."""
        of_drafter = (self.drafter.controller, self.drafter.budget) if self.drafter else ()
        return [rule for rule in (*of_drafter, self.text) if rule is not None]

    @cached_property
    def observers(self) -> list[RoundValue | Controller | TreeBudget | TextRule]:
        """``value`` (if it is set), followed by the rules, which read it."""
        return [rule for rule in (self.value, *self.rules) if rule is not None]

    def begin_request(self) -> None:
        """Call this before the first round of each text."""
        for rule in self.rules:
            rule.begin_request()

    def with_drafter(self, **changes: Any) -> "Drafting":
        """Return a copy whose drafter, if it has a drafter, has these attributes."""
        if self.drafter is None:
            return self
        return replace(self, drafter=replace(self.drafter, **changes))


PLAIN = Drafting()


@dataclass(frozen=True)
class Speculation:
    """How an :class:`LLM` drafts.

    Attributes:
        controller: The controller, which decides how far to draft. It is a name and options for
            :func:`eesd.controllers.make_controller`.
        tree: Number of nodes per level of the draft tree. A budget leaves out candidates that are
            not worth their place in the verify pass. With 1, the draft is a chain with second
            candidates. With 0, it is a chain without a budget.
        guard: Whether to pause a drafter while it is slower than plain decoding.
        seed: Seed of the controller's random generator.
        drafter: ``exit`` drafts with the exit head. ``text`` drafts from repetitions in the text;
            then the draft engine is not loaded, and ``controller`` and ``tree`` have no effect.
            ``both`` uses both drafters.

    Raises:
        EESDError: A value has the wrong type, or is out of range.
    """

    controller: str = "cost-aware-ts"
    tree: int = 0
    guard: bool = True
    seed: int = 0
    drafter: str = "both"

    def __post_init__(self) -> None:
        check_type("controller", self.controller, str, "a name such as fixed:k=4")
        check_integer("tree", self.tree, 0, MAX_TREE_NODES)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_flag("guard", self.guard)
        check_choice("drafter", self.drafter, DRAFTERS)

    @property
    def needs_engine(self) -> bool:
        """Whether a draft engine must be loaded."""
        return DRAFTERS[self.drafter] != (add_text,)


Make = Callable[[Drafting, Speculation, Manifest, Engines, DraftColumns], Drafting]
"""A function that adds a drafter to a :class:`Drafting`."""


def add_exit_head(
    drafting: Drafting,
    speculation: Speculation,
    manifest: Manifest,
    engines: Engines,
    columns: DraftColumns,
) -> Drafting:
    """Draft with the exit head, or with the quantized model, if the directory has one."""
    if not manifest.exit_head.can_draft:
        return drafting
    widest = min(manifest.draft_top_k, manifest.max_tree_nodes)
    if speculation.tree > widest:
        raise EESDError(f"tree is {speculation.tree}; this engine allows 0 to {widest}.")
    prior = manifest.exit_head.calibration
    value = drafting.value
    controller = make_controller(speculation.controller, speculation.seed, prior, value)
    if engines.draft is None:
        return drafting
    budget = TreeBudget(prior, value) if speculation.tree else None
    width = max(speculation.tree, 1)
    return replace(drafting, drafter=Drafter(engines.draft, controller, width, budget, columns))


def add_text(drafting: Drafting, *_: object) -> Drafting:
    """Draft from the text where it repeats itself."""
    return replace(drafting, text=TextRule(drafting.value))


DRAFTERS: Mapping[str, tuple[Make, ...]] = {
    EXIT: (add_exit_head,),
    TEXT: (add_text,),
    "both": (add_exit_head, add_text),
}
"""The choices of :attr:`Speculation.drafter`."""


def make_drafting(
    speculation: Speculation, manifest: Manifest, engines: Engines, columns: DraftColumns
) -> Drafting:
    """Make the drafters that ``speculation`` chooses, together with their controller, budget and
    guard.

    Raises:
        EESDError: The tree is too wide, the controller cannot be made, or the directory has no exit
            head and no other drafter is chosen.
    """
    guard = Guard() if speculation.guard else None
    drafting = Drafting(guard=guard, value=RoundValue())
    for add in DRAFTERS[speculation.drafter]:
        drafting = add(drafting, speculation, manifest, engines, columns)
    if not drafting.rules and not manifest.exit_head.can_draft:
        raise EESDError(
            "The directory has no exit head; export with --exit-head, or choose the drafter text."
        )
    return drafting
