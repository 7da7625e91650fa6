"""options={"verify": True}: what each rewritten site computed, against the plain collective and matmuls on the same inputs, and
what each product computed in float8, against the same product in 16 bits.

The rewrites keep the plain nodes and let `ub_overlap::compare(ours, plain, site)` see both; it hands `ours` on. Errors are kept
on the device and read when they are asked for, so that nothing waits. Not for CUDA graphs: a replay compares nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Errors above are no rounding: sums in another order stay well below."""


@dataclass(frozen=True, slots=True)
class SiteError:
    """The worst of all calls of a site, by its `Errors`."""

    calls: int
    error: float
    tolerance: float

    @property
    def bad(self) -> bool:
        return not self.error <= self.tolerance


class Errors:
    """By site, for this process. `measure` of (ours, plain) is a tensor without dims, float64."""

    def __init__(self, measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._measure = measure
        self._calls: dict[str, int] = {}
        self._worst: dict[str, Tensor] = {}
        self._tolerance: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, site: str, ours: Tensor, plain: Tensor) -> None:
        error = self._measure(ours, plain)
        with self._lock:
            known = self._worst.get(site)
            self._worst[site] = error if known is None else torch.maximum(known, error.to(known.device))
            self._calls[site] = self._calls.get(site, 0) + 1
            self._tolerance[site] = max(self._tolerance.get(site, 0.0), TOLERANCE.get(ours.dtype, 0.0))

    def by_site(self) -> dict[str, SiteError]:
        """Waits for the device."""
        with self._lock:
            return {
                site: SiteError(self._calls[site], float(worst), self._tolerance[site]) for site, worst in self._worst.items()
            }

    @contextlib.contextmanager
    def apart(self) -> Iterator[dict[str, SiteError]]:
        """What is added while open goes into the yielded dict when it closes, and nowhere else."""
        found: dict[str, SiteError] = {}
        with self._lock:
            kept = self._calls, self._worst, self._tolerance
            self._calls, self._worst, self._tolerance = {}, {}, {}
        try:
            yield found
        finally:
            found.update(self.by_site())
            with self._lock:
                self._calls, self._worst, self._tolerance = kept


def difference(ours: Tensor, plain: Tensor) -> Tensor:
    """The largest difference, over the largest magnitude of `plain`; inf where one is not finite and the other is."""
    if ours.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=ours.device)
    wide = torch.float64 if ours.dtype in (torch.float32, torch.float64) else torch.float32
    a, b = ours.detach().to(wide), plain.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(b.isfinite(), b.abs(), 0.0).amax()
    return (gap.amax() / scale.clamp_min(torch.finfo(torch.float32).tiny)).double()


def distance(ours: Tensor, plain: Tensor) -> Tensor:
    """||ours - plain|| / ||plain||: 0 where they are equal, inf where only one is finite. What rounding to few bits does to
    a sum shows in the norm; the largest element says little of it."""
    a, b = ours.detach().float(), plain.detach().float()
    gap = torch.where(a == b, 0.0, a - b).double().norm()
    return torch.where(gap == 0, 0.0, gap / b.double().norm()).nan_to_num(nan=torch.inf, posinf=torch.inf)


ERRORS = Errors(difference)
"""Of sites."""
FLOAT8 = Errors(distance)
"""Of float8 products, by `Cast.key`."""


def tolerance(dtype: str) -> float:
    """Of a type by its name; 0 for unknown ones."""
    return next((value for known, value in TOLERANCE.items() if str(known) == f"torch.{dtype}"), 0.0)
