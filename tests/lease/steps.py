"""The steps, the most telling first, and what each takes at most."""

from lease import Step, equality, families, machine, passes, plans, probes, quantized

STEPS = {
    "machine": Step(machine.describe, 60),
    "one pass": Step(equality.one_pass, 60),
    "tokens in float16": Step(equality.tokens_in("float16"), 150),
    "tokens in bfloat16": Step(equality.tokens_in("bfloat16"), 150),
    "families": Step(families.families, 240),
    "EAGLE-3": Step(families.eagle, 60),
    "quantized products": Step(quantized.products, 120),
    "passes of 4096 slots": Step(passes.with_slots(4096), 120),
    "rows": Step(passes.rows, 120),
    "tests": Step(probes.tests, 180),
    "plans": Step(plans.plans, 300),
    "passes of 32768 slots": Step(passes.with_slots(32768), 120),
    "constants": Step(passes.constants, 90),
    "a round": Step(probes.profile, 60),
    "memory checker": Step(probes.memory_checker, 120),
}
"""By name, in the order in which they run."""
