"""The kinds of sites and the reasons why a collective is left alone."""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    """The kinds of sites, named after the collective, whichever operand of the matmul it feeds."""

    ALL_GATHER_MATMUL = "all_gather_matmul"
    MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
    MATMUL_ALL_REDUCE = "matmul_all_reduce"
    ALL_GATHER = "all_gather"
    """An all_gather that feeds no matmul: only bulk overlap or a split form can hide it."""
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    """An exchange of rows, as of tokens with the ranks of their experts: only a split form can hide it."""
    OTHER = "other"
    """A collective of another kind (broadcast, coalesced forms), listed for completeness."""


COLLECTIVES = tuple(k.value for k in Kind if "matmul" not in k.value and k is not Kind.OTHER)
"""The collectives that sites are made of."""


class Reason(str, Enum):
    """The reasons why a collective is left alone, or a matmul stays out of float8. A closed set; each one is tested."""

    DISABLED_BY_USER = "disabled_by_user"
    """overlap="off", or an override requests "none"."""
    BELOW_THRESHOLD = "below_threshold"
    """overlap="auto" and the payload is smaller than `min_bytes`, and it fits into no bucket with others."""
    NO_GAIN = "no_gain"
    """overlap="auto" and no strategy is predicted to be faster than no overlap by more than the prediction error."""
    NO_MATMUL = "no_matmul"
    """No matmul produces or consumes the collective's tensor, and no independent matmul can run concurrently."""
    TRIVIAL_GROUP = "trivial_group"
    """The group has one rank: nothing is sent."""
    NO_TRANSPORT = "no_transport"
    """The runtime cannot reach the group's ranks: the device has no executor in this build, or the ranks share no host (there
    only split collectives run, over c10d)."""
    GROUP_NOT_STATIC = "group_not_static"
    """The group is a value of the graph (compile_on_one_rank), not a name."""
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    """Not float32, bfloat16 or float16 on both sides."""
    REDUCE_OP_UNSUPPORTED = "reduce_op_unsupported"
    """Another reduction than sum and avg."""
    COLLECTIVE_UNSUPPORTED = "collective_unsupported"
    """Coalesced, in-place or other collectives."""
    UNEVEN_SHARDS = "uneven_shards"
    """The gathered or scattered tensor is padded and trimmed: padding rows would be computed and sent."""
    SHARD_ORDER = "shard_order"
    """A cat reorders the shards, or its slices do not cover them exactly: not a plain gather."""
    LAYOUT = "layout"
    """Views or permutes between collective and matmul mix the sharded dimension with others."""
    CAST_IN_BETWEEN = "cast_in_between"
    """A cast that cannot move: other users need other bits, a cast came before, or it narrows before a sum."""
    REDUCE_DTYPE = "reduce_dtype"
    """The option reduce_dtype asks for another type than that of the matmul, in which its op sends."""
    SCALE_NOT_CONSTANT = "scale_not_constant"
    """The matmul's result is scaled by a tensor before the reduction; only a constant commutes on every rank."""
    NON_LINEAR = "non_linear"
    """An op between collective and matmul does not commute with the collective, or scales a part of what others read."""
    BROADCAST_SUM = "broadcast_sum"
    """A sum before the reduction broadcasts its matmul."""
    DEPENDENT_OPERAND = "dependent_operand"
    """The matmul's other operand depends on the collective, or on another matmul of the site."""
    MATMUL_TAKEN = "matmul_taken"
    """Every matmul that could hide this collective already hides another."""
    MEMORY = "memory"
    """What could hide it would raise the peak memory above its limit, or a step of a ring exceeds its landing memory."""
    MUTATION_BARRIER = "mutation_barrier"
    """An op with side effects lies between the members of the site, or random numbers would be drawn in another order."""
    DYNAMIC_SHAPE = "dynamic_shape"
    """A size that the op needs is symbolic and cannot be computed from the shard or the graph's inputs."""
    SCALES = "scales"
    """It carries scales of float8 tensors: the largest amax of all ranks, which no op reduces, or scales that the op of
    the rows takes with it. They are needed before anything else can begin."""
    SCALED_FORM = "scaled_form"
    """A float8 matmul in a form that the ops do not accept."""
    FILTERED = "filtered"
    """A linear that the fp8 filter keeps in high precision."""
    SIZES_NOT_16 = "sizes_not_16"
    """The inner dim or the columns of a matmul are not known to divide by 16 on all ranks, as float8 requires."""
    RECIPE = "recipe"
    """A matmul that the float8 recipe keeps in high precision."""
    STRATEGY_ILLEGAL = "strategy_illegal"
    """An override requests a strategy that the site does not have: stripes or direct where nothing is reduced, or where the
    shards cannot be cut; direct where the product is a sum, float8 or read by others; bulk without an independent matmul;
    pipelined where only independent matmuls exist."""


def collective_of(kind: str) -> str:
    """Return the collective of a kind: "matmul_reduce_scatter" -> "reduce_scatter"."""
    return kind.removesuffix("_matmul").removeprefix("matmul_")
