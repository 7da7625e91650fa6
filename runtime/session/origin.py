"""The group that the user named, for each process group: errors name its ranks.

Hierarchical collectives run on groups of ours that the user does not know (host_groups.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ranks_text

_count = itertools.count()
_keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Origin:
    """`group`: its c10d name. `key`: tells it from other groups of that name in this process, which were destroyed.

    `ranks`: by rank in the process group, the rank in the origin. `is_part`: the process group is one of ours, made from it.
    """

    group: str
    key: str
    ranks: tuple[int, ...]
    is_part: bool = False

    @property
    def label(self) -> str:
        """The process group, for errors."""
        return f"{ranks_text(self.ranks)} of group '{self.group}'" if self.is_part else f"group '{self.group}'"


def make_origin(members: Any, ranks: Sequence[int] | None = None) -> Origin:
    """Return the origin `members` of a process group of ours that has its `ranks`; of itself where that is None."""
    key = _keys.setdefault(members, f"{members.group_name}#{next(_count)}")
    numbers = range(members.size()) if ranks is None else ranks
    return Origin(members.group_name, key, tuple(numbers), ranks is not None)
