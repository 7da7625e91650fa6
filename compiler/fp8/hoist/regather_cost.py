"""Is a gather worth making twice: as float8 for the forward, and in 16 bits for backward?

    all_gather (2 bytes an element), exposed, before the forward's casts     against

    all_gather (1) beside the forward's float8 products,  all_gather (2) beside backward's weight gradients

What counts is what stays exposed, by the device's profile. Not counted: that backward keeps the shard in place of what was
gathered, which only helps.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ...cost.choice import MARGIN_US, choose
from ...cost.profile import Profile
from ...cost.regather import again_us
from ...cost.site_sizes import Hints, shape_at, shape_of_site
from ...graph.aten import element_effect, readers
from ...graph.matmul import Matmul, as_matmul, find_indivisible_size
from ...match.all_gather import match_all_gather
from ...match.collectives import read_collective
from ...match.site import Bulk, Gather
from ...plan.decision import SiteSizes
from ...plan.strategy import NONE
from .gather_readers import GatherReaders


def why_not_twice(found: GatherReaders, profile: Profile, hints: Hints) -> str:
    """Why it is predicted to be no faster; "" where it is faster, or where a size has no value."""
    c, products = read_collective(found.gather), products_of(found)
    if (alone := shape_of_site(Bulk(c, ()), hints)) is None:
        return ""
    matmuls = tuple((*p.shape, p.inner, False) for p in products)
    narrow = shape_at(
        SiteSizes("all_gather_matmul", c.ranks, "float8", matmuls, products[0].lhs.rows, products[0].inner), hints
    )
    if narrow is None:
        return ""
    now = choose(alone, profile).predictions[str(NONE)].us
    choice = choose(narrow, profile)
    best = choice.predictions[str(choice.strategy)]
    first = max(0.0, best.us - best.matmul_us)
    match = match_all_gather(c, {n: i for i, n in enumerate(found.gather.graph.nodes)})
    own = replace(match, kept_aliases=()) if isinstance(match, Gather) else None  # of 16 bits none but those products are left
    second = again_us(c, own, (), profile, hints)
    if first + second + MARGIN_US < now:
        return ""
    told = f"{now:.0f} gathered once in 16 bits, {first:.0f} in float8 and {second:.0f} again in backward"
    return f"predicted exposed us by profile {profile}: {told}"


def products_of(found: GatherReaders) -> list[Matmul]:
    """The float8 products that could run beside the gather of their rows."""
    return [p for cast in sorted(found.casts) for p in _products(cast) if not find_indivisible_size(p)]


def _products(node: Node) -> list[Matmul]:
    """The products whose left operand is `node`, or a view of it."""
    found = []
    for user in readers(node):
        if (p := as_matmul(user)) is not None:
            found += [p] if p.lhs.node is node else []
        elif (step := element_effect(user)) is not None and step.source is node:
            found += _products(user)
    return found
