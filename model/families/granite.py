"""Dense models of Granite have four factors. No factor needs an operation, because each is merged
into an existing part of the decoder.

* ``attention_multiplier`` is the scale of attention.
* ``residual_multiplier`` m multiplies everything that is added to x. The decoder computes x / m
  instead, and adds the same values without the factor m. Norms of x / m with an epsilon of
  ``eps / m ** 2`` equal the norms of x.
* ``embedding_multiplier`` is then divided by m. The table itself is unchanged, because the LM head
  is often tied to it.
* ``logits_scaling`` divides the final norm's weight. The division is exact for powers of two, as in
  all published models. For other values, norms are float32 in every directory.
"""

from math import frexp

from eesd.common.weights import FINAL_NORM
from eesd.model.family import Family, Own, Sizes, attention_biases, take_positive
from eesd.model.fields import Fields


def take_factors(fields: Fields, sizes: Sizes) -> Own:
    """Return the parts of the geometry for the four factors and for ``attention_bias``."""
    residual, logits = (
        take_positive(fields, name, 1.0) for name in ("residual_multiplier", "logits_scaling")
    )
    parts = attention_biases(fields) | {
        "attention_scale": take_positive(fields, "attention_multiplier", 1.0),
        "embedding_scale": take_positive(fields, "embedding_multiplier", 1.0) / residual,
        "rms_norm_eps": sizes.eps / residual**2,
        "wide_norms": frexp(logits)[0] != 0.5,
    }
    return Own(parts, divided={FINAL_NORM: logits})


def _own(fields: Fields, sizes: Sizes) -> Own:
    own = take_factors(fields, sizes)
    return own._replace(parts={**own.parts, "mlp_bias": fields.flag("mlp_bias")})


GRANITE = Family("granite", "GraniteForCausalLM", positions=2048, own=_own)
