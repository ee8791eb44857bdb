"""jax's primitives by their effect on the elements of their operands."""

from jax_offload._program.jaxprs import Equation, called_by, holds_jaxprs
from jax_offload._program.own_primitives import MARK, is_composite

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt
    ceil clamp clz complex conj convert_element_type copy cos cosh device_put digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not optimization_barrier or population_count pow real reduce_precision rem reshard
    round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor""".split()
) | {MARK}
PLACED = frozenset("device_put sharding_constraint reshard".split())  # the primitives that say where a value is
REDUCE = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin".split())
CHECKPOINT = frozenset(("checkpoint", "remat2"))
SHAPES = frozenset("broadcast_in_dim iota pad reshape slice squeeze transpose".split())  # they compute nothing
_OTHERS = frozenset(  # they rearrange elements or make random ones, or only the newest jax has them
    """concatenate dynamic_slice dynamic_update_slice log2 mulhi name one_minus_square random_bits random_clone
    random_fold_in random_seed random_split random_unwrap random_wrap rev rng_bit_generator split stack threefry2x32
    tile unstack""".split()
)
CHEAP = ELEMENTWISE | REDUCE | SHAPES | _OTHERS


def can_be_cut(eqn: Equation) -> bool:
    """Whether an equation may hold equations that its results do not need."""
    return eqn.primitive.name not in CHEAP and not is_composite(eqn) and holds_jaxprs(eqn.params)


def is_cheap(eqn: Equation) -> bool:
    """Whether an equation takes about as long as its operands are read: it is no part of a pass through a network."""
    name = eqn.primitive.name
    return name in CHEAP or (name in ("jit", "pjit") and all(map(is_cheap, called_by(eqn).jaxpr.eqns)))


def is_loop(eqn: Equation) -> bool:
    return eqn.primitive.name in ("scan", "while")
