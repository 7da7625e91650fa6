"""Predict whether to gather twice: as float8 in forward, and in 16 bits in backward.

    all_gather (2 bytes per element), exposed, before the forward's casts                            against

    all_gather (1) concurrent with float8 matmuls,  all_gather (2) concurrent with weight gradients

The measure is the exposed time by the device's profile. Not counted: backward saves the shard instead of the gathered tensor,
which only helps.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ...cost.choice import MARGIN_US, choose
from ...cost.profile import Profile
from ...cost.regather import regather_us
from ...cost.site_sizes import Hints, shape_at, shape_of_site
from ...graph.aten import element_effect, readers
from ...graph.matmul import Matmul, as_matmul, find_indivisible_size
from ...match.all_gather import match_all_gather
from ...match.collectives import read_collective
from ...match.site import Bulk, Gather
from ...plan.decision import SiteSizes
from ...plan.strategy import NONE
from .gather_readers import GatherReaders


def explain_no_gain(gather_readers: GatherReaders, profile: Profile, hints: Hints) -> str:
    """Return why a second gather is predicted to be no faster. Return "" if it is faster, or if a size has no value."""
    collective, matmuls = read_collective(gather_readers.gather), find_float8_matmuls(gather_readers)
    if (bulk_shape := shape_of_site(Bulk(collective, ()), hints)) is None:
        return ""
    shapes = tuple((*m.shape, m.inner, False) for m in matmuls)
    sizes = SiteSizes("all_gather_matmul", collective.ranks, "float8", shapes, matmuls[0].lhs.rows, matmuls[0].inner)
    if (float8_shape := shape_at(sizes, hints)) is None:
        return ""
    once_us = choose(bulk_shape, profile).predictions[str(NONE)].us
    choice = choose(float8_shape, profile)
    best = choice.predictions[str(choice.strategy)]
    forward_us = max(0.0, best.us - best.matmul_us)
    match = match_all_gather(collective, {n: i for i, n in enumerate(gather_readers.gather.graph.nodes)})
    # Only the weight gradients still read 16 bits.
    site = replace(match, kept_aliases=()) if isinstance(match, Gather) else None
    backward_us = regather_us(collective, site, (), profile, hints)
    if forward_us + backward_us + MARGIN_US < once_us:
        return ""
    times = f"{once_us:.0f} gathered once in 16 bits, {forward_us:.0f} in float8 and {backward_us:.0f} again in backward"
    return f"predicted exposed us by profile {profile}: {times}"


def find_float8_matmuls(gather_readers: GatherReaders) -> list[Matmul]:
    """Return the float8 matmuls that could run concurrently with the gather of their rows."""
    matmuls = [m for cast in sorted(gather_readers.casts) for m in _find_matmuls_by_lhs(cast)]
    return [m for m in matmuls if not find_indivisible_size(m)]


def _find_matmuls_by_lhs(node: Node) -> list[Matmul]:
    """Return the matmuls whose left operand is `node` or a view of it."""
    matmuls: list[Matmul] = []
    for user in readers(node):
        if (matmul := as_matmul(user)) is not None:
            matmuls += [matmul] if matmul.lhs.node is node else []
        elif (step := element_effect(user)) is not None and step.source is node:
            matmuls += _find_matmuls_by_lhs(user)
    return matmuls
