"""The time that backward takes longer if it gathers a tensor again instead of keeping it."""

from __future__ import annotations

from ..graph.matmul import Matmul
from ..match.collectives import Collective
from ..match.site import Bulk, Gather, Site
from ..plan.strategy import NONE
from .choice import choose
from .profile import Profile
from .site_sizes import Hints, shape_of_site
from .traffic import BULK_PRODUCTS, FLOPS_PER_BYTE, FLOPS_PER_US, bytes_sent


def regather_us(
    c: Collective,
    site: Gather | None,
    independent_matmuls: tuple[Matmul, ...],
    profile: Profile,
    hints: Hints,
    hides: bool = True,
) -> float:
    """Return the exposed microseconds of the second gather, hidden as well as possible.

    It is hidden by the matmuls that read it (`site`) or by `independent_matmuls`; with hides=False all of it is exposed. An
    estimate is returned where sizes or dtype have no cost.
    """
    alone = Bulk(c, ())
    shape = shape_of_site(alone, hints)
    if shape is None:
        return (bytes_sent(alone) or 0) * FLOPS_PER_BYTE / FLOPS_PER_US
    open_: list[Site] = [
        s for s in (site, Bulk(c, independent_matmuls[:BULK_PRODUCTS]) if independent_matmuls else None) if s is not None
    ]
    found = [choose(shape, profile).predictions[str(NONE)].us]
    for s in open_ if hides else []:
        if (weighed := shape_of_site(s, hints)) is not None:
            choice = choose(weighed, profile)
            best = choice.predictions[str(choice.strategy)]
            found.append(max(0.0, best.us - best.matmul_us))
    return min(found)
