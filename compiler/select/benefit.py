"""The benefit of running a collective in one way: a lexicographic key.

    forced        sites whose strategy the user requests come first
    overlapped    with overlap="force", any overlap comes before none
    own_matmuls   with overlap="force", a site's own matmuls come before independent ones
    saved_us      then the predicted microseconds

Benefits of several sites add up field by field, which keeps their order.
"""

from __future__ import annotations

from typing import NamedTuple


class Benefit(NamedTuple):
    forced: int
    overlapped: int
    own_matmuls: int
    saved_us: float

    def plus(self, other: Benefit) -> Benefit:
        return Benefit(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])

    def plus_us(self, us: float) -> Benefit:
        return Benefit(self[0], self[1], self[2], self[3] + us)

    @property
    def negated(self) -> Benefit:
        """The key that sorts the largest benefit first."""
        return Benefit(-self[0], -self[1], -self[2], -self[3])


NO_BENEFIT = Benefit(0, 0, 0, 0.0)


def total_benefit(benefits: list[Benefit]) -> Benefit:
    """Return the sum of `benefits`."""
    forced, overlapped, own_matmuls, saved_us = 0, 0, 0, 0.0
    for benefit in benefits:
        forced += benefit[0]
        overlapped += benefit[1]
        own_matmuls += benefit[2]
        saved_us += benefit[3]
    return Benefit(forced, overlapped, own_matmuls, saved_us)
