"""The steps with their time limits. The most informative step comes first."""

from functools import partial

from lab.lease import Step, equality, machine, passes, plans, probes, quantized, whole

STEPS = {
    "machine": Step(machine.describe, 60),
    "one pass": Step(equality.one_pass, 60),
    **{f"8B, {name}": Step(partial(whole.variant, name), 90) for name in whole.VARIANTS},
    "a call split": Step(whole.split, 90),
    "choices": Step(whole.choices, 60),
    "passes of 4096 slots": Step(partial(passes.with_slots, 4096), 120),
    "passes of 32768 slots": Step(partial(passes.with_slots, 32768), 120),
    "quantized products": Step(quantized.products, 120),
    **{
        f"served, {clients} clients": Step(partial(whole.served, clients), 120)
        for clients in whole.CLIENTS
    },
    "tests": Step(probes.tests, 180),
    "commands": Step(probes.commands, 120),
    "tokens in float16": Step(partial(equality.tokens_in, "float16"), 150),
    "tokens in bfloat16": Step(partial(equality.tokens_in, "bfloat16"), 150),
    "races": Step(partial(probes.checker, "racecheck"), 120),
    "memory checker": Step(partial(probes.checker, "memcheck"), 120),
    "families": Step(equality.families, 240),
    "plans": Step(plans.plans, 300),
}
"""The steps by name. They are in the order in which they run."""
