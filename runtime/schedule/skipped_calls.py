"""What happens when a rank leaves a call out: another branch taken, an exception swallowed, a graph that differs.

That is a bug of the program, and c10d would hang or mix up data. Here it must end as a tag mismatch (an error at once, naming
both sites) or as a wait that nobody ends (a timeout naming the peer), never as a call that returns wrong rows.
The argument for all programs is the heard rule of `checker.py`; this plays it, on the reference executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from .interpret import Machine, RunOutcome, Site
from .schedule_error import ScheduleError
from .steps import Schedule


def check_skip(
    calls: Sequence[Sequence[Schedule]],
    groups: Sequence[tuple[int, ...]] | None = None,
    seeds: Sequence[int] = (0, 1),
    tags: Sequence[int] | None = None,
) -> dict[tuple[int, int], RunOutcome]:
    """Play `calls` once for every (call, rank) that could leave it out, under a few interleavings each.

    `tags[i]` is the site of call i (default: calls with the same schedules are the same site, as in a training loop).
    Returns how each one ended; raises `ScheduleError` if a skip went unseen or a rank returned wrong rows.
    """
    every = [tuple(schedules) for schedules in calls]
    distinct = list(dict.fromkeys(every))
    sites = []
    for i, schedules in enumerate(every):
        ranks = len(schedules)
        group = tuple(range(ranks)) if groups is None else groups[i]
        tag = distinct.index(schedules) + 1 if tags is None else tags[i]
        sites.append(Site(schedules, group, tag, (2,) * ranks))
    found: dict[tuple[int, int], RunOutcome] = {}
    for number, site in enumerate(sites):
        for me in site.group if len(site.group) > 1 else ():  # alone, a rank misleads nobody
            for seed in seeds:
                outcome = Machine(sites, seed, skip=[(number, me)]).run()
                if outcome.wrong:
                    raise ScheduleError("skip", f"rank {me} left out call {number}, and {outcome.wrong[0]}")
                if outcome.clean:
                    raise ScheduleError("skip", f"rank {me} left out call {number}, and every rank ended all its calls")
                found[number, me] = outcome
    return found
