"""Device profiles of tests, as files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from ub_overlap.compiler.cost import Profile
from ub_overlap.compiler.cost.curve import Curve


def with_exchanges_as_pushes(profile: Profile) -> Profile:
    """Return `profile` with plain all_to_alls that take 15 us more than pushes. So none of ours gains unless it is hidden."""
    curve: Curve = tuple((size, us + 15.0) for size, us in profile.push)
    return replace(profile, collectives={**profile.collectives, "all_to_all": {2: curve}})


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ub_overlap-profiles-")


def stored(profile: Profile) -> str:
    """Write a profile to a file that this process removes at its end. Return the path."""
    path = Path(_folder().name) / f"{profile.digest}.json"
    path.write_text(profile.to_json())
    return str(path)
