"""Check that a call skipped by one rank is noticed: another branch taken, a swallowed exception, a different graph.

Such a program has a bug, and c10d would hang or mix up data. Here it must end as a tag mismatch (an immediate error that names
both sites) or as a wait without a signal (a timeout that names the peer). No call may return wrong rows.
The heard rule of `checker.py` proves this for all programs. This file tests it on the reference executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from .interpret import Machine, RunOutcome, SimulatedCall
from .schedule_error import ScheduleError
from .steps import Schedule


def check_skip(
    calls: Sequence[Sequence[Schedule]],
    groups: Sequence[tuple[int, ...]] | None = None,
    seeds: Sequence[int] = (0, 1),
    tags: Sequence[int] | None = None,
) -> dict[tuple[int, int], RunOutcome]:
    """Run `calls` once for every (call, rank) that could be skipped, under a few interleavings each.

    `tags[i]` is the site of call i (default: calls with the same schedules are the same site, as in a training loop).
    Return the outcomes. Raise ScheduleError if a skip was not noticed or a rank returned wrong rows.
    """
    all_calls = [tuple(schedules) for schedules in calls]
    distinct = list(dict.fromkeys(all_calls))
    sites = []
    for i, schedules in enumerate(all_calls):
        ranks = len(schedules)
        group = tuple(range(ranks)) if groups is None else groups[i]
        tag = distinct.index(schedules) + 1 if tags is None else tags[i]
        sites.append(SimulatedCall(schedules, group, tag, (2,) * ranks))
    outcomes: dict[tuple[int, int], RunOutcome] = {}
    for number, site in enumerate(sites):
        for me in site.group if len(site.group) > 1 else ():  # a group of one has no peers to notice
            for seed in seeds:
                outcome = Machine(sites, seed, skip=[(number, me)]).run()
                if outcome.wrong:
                    raise ScheduleError("skip", f"rank {me} skipped call {number}, and {outcome.wrong[0]}")
                if outcome.is_clean:
                    raise ScheduleError("skip", f"rank {me} skipped call {number}, and every rank ended all its calls")
                outcomes[number, me] = outcome
    return outcomes
