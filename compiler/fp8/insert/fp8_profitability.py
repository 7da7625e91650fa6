"""Predict whether a linear is faster in float8: its matmuls by the device's profile, its casts by their memory traffic.

Counted for each quantized tensor: the passes that read 16 bits and write a byte per element. Counted for each transposed
copy: a byte read and a byte written. A cast with per-tensor scales takes two passes, as the amax must be known first; so does
a cached cast of a weight. A cast with per-row scales takes one, as does a delayed cast of an activation or gradient. Weights
count as changed in every call: several microbatches save more. Linears share the cost of a cast that they share. Not counted:
gathers send half the bytes, which only helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...cost.matmul_time import matmul_us
from ...cost.profile import Profile
from ...cost.site_sizes import Hints
from ...graph.matmul import Matmul
from ...graph.sizes import Size, about, evaluate_size
from ..recipe import Recipe
from .linears import Linear, Role

_LAYOUT = {Role.FORWARD: "nt", Role.INPUT_GRADIENT: "nn", Role.WEIGHT_GRADIENT: "tn"}


class Fp8Profitability:
    """Predictions for the linears of one graph.

    `linears`: all of them. `dtype`: theirs. `weights_cached`: whether casts of weights outlive a call.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        recipe: Recipe,
        profile: Profile,
        hints: Hints,
        dtype: str,
        weights_cached: bool = True,
    ) -> None:
        self._sharing = Counter(linear.activation for linear in linears)
        self._recipe, self._profile, self._hints = recipe, profile, hints
        self._dtype, self._weights_cached = dtype, weights_cached

    def explain_slowdown(self, linear: Linear, matmuls: list[Matmul]) -> str:
        """Return why `linear` is predicted to be slower with `matmuls` in float8. Return "" if faster or of unknown sizes."""
        roles = {m.node: role for role, m in linear.matmuls}
        plain_us = float8_us = 0.0
        for matmul in matmuls:
            m, n, k = (self._number(s) for s in (matmul.shape[0], matmul.shape[1], matmul.inner))
            if m is None or n is None or k is None:
                return ""
            plain_us += matmul_us(self._profile, self._dtype, _LAYOUT[roles[matmul.node]], m, n, k)
            float8_us += matmul_us(self._profile, "float8", "nt", m, n, k)
        casts_us = self._casts_us(linear, {roles[m.node] for m in matmuls})
        if casts_us is None or float8_us + casts_us < plain_us:
            return ""
        times = f"{self._dtype} {plain_us:.0f}, float8 {float8_us:.0f} and casts {casts_us:.0f}"
        return f"predicted us by profile {self._profile}: {times}"

    def _casts_us(self, linear: Linear, roles: set[Role]) -> float | None:
        """Return the time of the casts and copies that the matmuls of `roles` need."""
        recipe, sharing = self._recipe, self._sharing[linear.activation]
        forward = linear.forward
        rows, cols, inner = (self._number(s) for s in (forward.shape[0], forward.shape[1], forward.inner))
        if rows is None or cols is None or inner is None:
            return None
        current_passes = 1 if recipe.per_row else 2
        weight_passes = 2 if self._weights_cached else current_passes
        passes = 1 if recipe.delayed else current_passes
        # Bytes per element: of a cast, of a weight's cast, of a transposed copy.
        cast, weight_cast, transpose = 2 * passes + 1, 2 * weight_passes + 1, 2
        launches = 3 if recipe.delayed else passes  # delayed: two of the sampled rows, one of the rows' amaxes
        x, w, dy = rows * inner, cols * inner, rows * cols
        moved, kernels = x * cast / sharing + w * weight_cast, launches / sharing + weight_passes
        if Role.INPUT_GRADIENT in roles:
            moved, kernels = moved + dy * cast + w * (weight_cast if recipe.per_row else transpose), kernels + launches + 1
        if Role.WEIGHT_GRADIENT in roles:
            moved, kernels = moved + dy * transpose + x * transpose / sharing, kernels + 1 + 1 / sharing
        return moved / (self._profile.compute.memory_gbs * 1e3) + kernels * self._profile.compute.launch_us

    def _number(self, size: Size) -> int | None:
        """Return `size` rounded, as ranks whose shards differ a little must decide alike. None: it has no value."""
        number = evaluate_size(size, self._hints)
        return None if number is None else about(number)
