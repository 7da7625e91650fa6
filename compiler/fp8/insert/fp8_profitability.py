"""Is a linear faster in float8? Its products by the device's profile, and the casts by what they move through memory.

Counted for each tensor that is quantised: the passes that read 16 bits (two for one scale a tensor, as the largest magnitude
must be known first, and for weights whose casts are kept; one for scales of rows, and for delayed ones, which activations and
gradients have) and write a byte; for each transposed copy a byte read and a byte written. Weights count as changed in every
call: who has several microbatches saves more. A cast that several linears share is shared out. Not counted: that gathers
send half the bytes, which only helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import sympy

from ...cost.matmul_time import matmul_us
from ...cost.profile import Profile
from ...cost.site_sizes import Hints
from ...cost.traffic import about
from ...graph.matmul import Matmul
from ...graph.sizes import Size
from ..recipe import Recipe
from .linears import Linear, Role

_LAYOUT = {Role.FORWARD: "nt", Role.INPUT_GRADIENT: "nn", Role.WEIGHT_GRADIENT: "tn"}


def weigh(
    found: Sequence[Linear], recipe: Recipe, profile: Profile, hints: Hints, dtype: str, kept: bool = True
) -> Callable[..., str]:
    """(linear, the products that would be float8) -> why float8 is predicted to be slower; "" where it is faster, or where a
    size has no value. `found`: all linears of the graph; `dtype`: what they are in; `kept`: are casts of weights?"""
    sharing = Counter(linear.activation for linear in found)

    def slower(linear: Linear, products: list[Matmul]) -> str:
        roles = {p.node: role for role, p in linear.products}
        plain = fast = 0.0
        for p in products:
            m, n, k = (_number(s, hints) for s in (p.shape[0], p.shape[1], p.inner))
            if m is None or n is None or k is None:
                return ""
            plain += matmul_us(profile, dtype, _LAYOUT[roles[p.node]], m, n, k)
            fast += matmul_us(profile, "float8", "nt", m, n, k)
        roles_left = {roles[p.node] for p in products}
        casts = _casts_us(linear, roles_left, recipe, profile, hints, sharing[linear.activation], kept)
        if casts is None or fast + casts < plain:
            return ""
        return f"predicted us by profile {profile}: {dtype} {plain:.0f}, float8 {fast:.0f} and casts {casts:.0f}"

    return slower


def _casts_us(
    linear: Linear, roles: set[Role], recipe: Recipe, profile: Profile, hints: Hints, sharing: int, kept: bool
) -> float | None:
    p = linear.forward
    rows, cols, inner = (_number(s, hints) for s in (p.shape[0], p.shape[1], p.inner))
    if rows is None or cols is None or inner is None:
        return None
    current = 1 if recipe.rows else 2
    of_weight = 2 if kept else current
    passes = 1 if recipe.delayed else current
    # bytes an element: of a cast, of a weight's cast, of a transposed copy
    down, weight, turned = 2 * passes + 1, 2 * of_weight + 1, 2
    launches = 3 if recipe.delayed else passes  # csrc/cuda/quantise.cu: what a first call needs is launched always
    x, w, dy = rows * inner, cols * inner, rows * cols
    moved, kernels = x * down / sharing + w * weight, launches / sharing + of_weight
    if Role.INPUT_GRADIENT in roles:
        moved, kernels = moved + dy * down + w * (weight if recipe.rows else turned), kernels + launches + 1
    if Role.WEIGHT_GRADIENT in roles:
        moved, kernels = moved + dy * turned + x * turned / sharing, kernels + 1 + 1 / sharing
    return moved / (profile.compute.memory_gbs * 1e3) + kernels * profile.compute.launch_us


def _number(size: Size, hints: Hints) -> int | None:
    """About: ranks whose shards differ by a little must decide alike."""
    if isinstance(size, int):
        return about(size)
    value = sympy.sympify(size).subs(hints)
    return about(int(value)) if value.is_Integer else None
