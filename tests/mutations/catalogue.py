"""All mutations, by area."""

from __future__ import annotations

from . import executors, float8, matching, placing, planner, reports, rewriting, schedules, selecting, sessions, survivors
from .mutation import Mutation

AREAS: dict[str, tuple[Mutation, ...]] = {
    "matching": matching.MUTATIONS,
    "selecting": selecting.MUTATIONS,
    "placing": placing.MUTATIONS,
    "rewriting": rewriting.MUTATIONS,
    "schedules": schedules.MUTATIONS,
    "executors": executors.MUTATIONS,
    "sessions": sessions.MUTATIONS,
    "reports": reports.MUTATIONS,
    "float8": float8.MUTATIONS,
    "planner": planner.MUTATIONS,
}
"""Area -> its mutations. Some test notices each."""
SURVIVORS: tuple[Mutation, ...] = survivors.MUTATIONS
"""Mutations that no test is known to notice. `run survivors` tries them."""
