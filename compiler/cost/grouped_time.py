"""The time of a grouped matmul: tiles in waves, or its bytes at a share of the memory's rate.

    time = setup + max( waves * (2 tm tn K / (rate of a unit * efficiency) + wave_us), bytes / (memory * share) )

The kernels are those that torch calls on Hopper. Their numbers were fitted to the 5445 shapes that `benchmarks.grouped_matmul`
times on an H200 (docs/data/grouped_matmul_h200.json). In bfloat16 these are tiles of 256 x 256 by pairs of multiprocessors
where both sizes of a product exceed 128, else of 64 x 128. Groups are taken as equally large: with other sizes of the same sum
these calls took up to 20% more or less (on an H100).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .matmul_time import matmul_us
from .profile import Profile
from .site_shape import SIZES

_GROUPED_DTYPES = ("bfloat16", "float8")
"""torch has grouped kernels for these; it loops over the groups of other types."""
_OUTPUT_SIZE = 2
"""Bytes of an element of the product of float8 operands."""
_LARGE = 128
"""Products with both sizes above this are computed by large tiles."""
_THIN = 16
"""Members of a batch with a size below this, such as sums over a token's experts, are no work for tiles: they move bytes."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Tiles of `rows` x `columns` by `units` multiprocessors, which reach `efficiency` of their nominal rate."""

    rows: int
    columns: int
    units: int
    efficiency: float
    wave_us: float
    setup_us: float
    """Launch included: a first kernel computes the addresses of the groups."""
    memory_share: float


_ROWS = _Kernel(64, 128, 1, 0.9, 0.5, 11.0, 0.815), _Kernel(256, 256, 2, 1.142, 3.1, 11.0, 0.815)
"""The rows or the columns are divided: (small, large)."""
_INNER = _Kernel(64, 128, 1, 0.313, 4.4, 10.0, 0.61), _Kernel(256, 256, 2, 1.138, 3.1, 10.0, 0.61)
"""The inner dim is divided: gradients of experts' weights."""
_FLOAT8 = _Kernel(64, 128, 1, 1.0, 0.06, 12.0, 0.77), _Kernel(128, 256, 1, 1.04, 3.85, 7.9, 0.353)
"""The rows are divided, operands are float8 with a scale for each row."""


@lru_cache(maxsize=4096)
def grouped_us(profile: Profile, dtype: str, groups: int, m: int, n: int, k: int, divided: str) -> float:
    """Return the microseconds of `groups` products [m, k] @ [k, n] of one call, launch included; 0 for empty ones.

    `divided`: "m", "n" or "k", the size that the groups divide among them, and "" for a batch. See graph/grouped_matmul.py.
    """
    if min(groups, m, n, k) <= 0:
        return 0.0
    if divided:
        m, n, k = (-(-size // groups) if name == divided else size for name, size in zip("mnk", (m, n, k), strict=True))
    c, layout = profile.compute, "tn" if divided == "k" else "nt"
    moved = groups * ((m * k + k * n) * SIZES[dtype] + m * n * max(SIZES[dtype], _OUTPUT_SIZE)) / (c.memory_gbs * 1e3)
    rate = c.tflops.get(dtype, c.tflops["bfloat16"]) * 1e6  # operations a microsecond
    if not divided:
        if min(m, n, k) >= _THIN:
            return max(matmul_us(profile, dtype, layout, m, n, k, groups), moved)
        return c.launch_us + max(2 * groups * m * n * k / rate, moved)
    if dtype not in _GROUPED_DTYPES or profile.key.get("device") == "cpu":
        return groups * matmul_us(profile, dtype, layout, m, n, k)
    kernels = _INNER if divided == "k" else _FLOAT8 if dtype == "float8" else _ROWS
    kernel = kernels[min(m, n) > _LARGE]
    at_once = max(1, c.units // kernel.units)
    waves = -(-groups * -(-m // kernel.rows) * -(-n // kernel.columns) // at_once)
    tile = 2 * kernel.rows * kernel.columns * k
    computed = waves * (tile * at_once / (rate * kernel.efficiency) + kernel.wave_us)
    return kernel.setup_us + max(computed, moved / kernel.memory_share)
