"""What it adds to backward to gather a tensor again, instead of keeping it."""

from __future__ import annotations

from ..graph.matmul import Matmul
from ..match.collectives import Collective
from ..match.site import Bulk, Gather, Site
from ..plan.strategy import NONE
from .choice import choose
from .profile import Profile
from .site_sizes import Hints, shape_of_site
from .traffic import BULK_PRODUCTS, FLOPS_PER_BYTE, FLOPS_PER_US, bytes_sent


def again_us(
    c: Collective, site: Gather | None, beside: tuple[Matmul, ...], profile: Profile, hints: Hints, hides: bool = True
) -> float:
    """Microseconds that stay exposed of the second gather, as well as it can be hidden: behind the matmuls that read it
    (`site`), or `beside` others; with hides=False all of it. By rule of thumb where sizes or dtype have no cost."""
    alone = Bulk(c, ())
    shape = shape_of_site(alone, hints)
    if shape is None:
        return (bytes_sent(alone) or 0) * FLOPS_PER_BYTE / FLOPS_PER_US
    open_: list[Site] = [s for s in (site, Bulk(c, beside[:BULK_PRODUCTS]) if beside else None) if s is not None]
    found = [choose(shape, profile).predictions[str(NONE)].us]
    for s in open_ if hides else []:
        if (weighed := shape_of_site(s, hints)) is not None:
            choice = choose(weighed, profile)
            best = choice.predictions[str(choice.strategy)]
            found.append(max(0.0, best.us - best.matmul_us))
    return min(found)
