"""options={"verify": True}: compare each rewritten site with the plain collective and matmuls on the same inputs, and each
float8 matmul with the same matmul in 16 bits.

The rewrites keep the plain nodes and add `ub_overlap::compare(ours, plain, site)`, which returns `ours`. Errors stay on the
device until they are read, so that comparing does not synchronize. A replay of a CUDA graph compares nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Larger errors are not rounding: sums in another order stay well below."""


@dataclass(frozen=True, slots=True)
class SiteError:
    """The largest error over all calls of a site, by its `ErrorTable`."""

    calls: int
    error: float
    tolerance: float

    @property
    def is_bad(self) -> bool:
        """The error exceeds the tolerance, or is NaN."""
        return not self.error <= self.tolerance


class ErrorTable:
    """Largest errors by site, for this process. `measure(ours, plain)`: a float64 tensor without dims."""

    def __init__(self, measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._measure = measure
        self._calls: dict[str, int] = {}
        self._worst: dict[str, Tensor] = {}
        self._tolerance: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, site: str, ours: Tensor, plain: Tensor) -> None:
        """Measure one call of `site`."""
        error = self._measure(ours, plain)
        with self._lock:
            previous = self._worst.get(site)
            self._worst[site] = error if previous is None else torch.maximum(previous, error.to(previous.device))
            self._calls[site] = self._calls.get(site, 0) + 1
            self._tolerance[site] = max(self._tolerance.get(site, 0.0), TOLERANCE.get(ours.dtype, 0.0))

    def by_site(self) -> dict[str, SiteError]:
        """Return the errors by site. Synchronizes with the device."""
        with self._lock:
            return {
                site: SiteError(self._calls[site], float(worst), self._tolerance[site]) for site, worst in self._worst.items()
            }

    @contextlib.contextmanager
    def record_separately(self) -> Iterator[dict[str, SiteError]]:
        """Collect errors into the yielded dict instead of this table. The dict is filled at exit."""
        errors: dict[str, SiteError] = {}
        with self._lock:
            outer = self._calls, self._worst, self._tolerance
            self._calls, self._worst, self._tolerance = {}, {}, {}
        try:
            yield errors
        finally:
            errors.update(self.by_site())
            with self._lock:
                self._calls, self._worst, self._tolerance = outer


def difference(ours: Tensor, plain: Tensor) -> Tensor:
    """Return the largest difference divided by the amax of `plain`; inf where only one of the two is finite."""
    if ours.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=ours.device)
    wide = torch.float64 if ours.dtype in (torch.float32, torch.float64) else torch.float32
    a, b = ours.detach().to(wide), plain.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(b.isfinite(), b.abs(), 0.0).amax()
    return (gap.amax() / scale.clamp_min(torch.finfo(torch.float32).tiny)).double()


def distance(ours: Tensor, plain: Tensor) -> Tensor:
    """Return ||ours - plain|| / ||plain||: 0 where they are equal, inf where only one is finite.

    The norm shows how rounding to few bits changes a sum; the largest element does not.
    """
    a, b = ours.detach().float(), plain.detach().float()
    gap = torch.where(a == b, 0.0, a - b).double().norm()
    return torch.where(gap == 0, 0.0, gap / b.double().norm()).nan_to_num(nan=torch.inf, posinf=torch.inf)


ERRORS = ErrorTable(difference)
"""Errors of sites."""
FLOAT8 = ErrorTable(distance)
"""Errors of float8 matmuls, by `CastDecision.key`."""


def tolerance(dtype: str) -> float:
    """Return the tolerance of a dtype by its name; 0 for unknown ones."""
    return next((value for key, value in TOLERANCE.items() if str(key) == f"torch.{dtype}"), 0.0)
