"""graph -> sites. One file a kind; each draws the op chains it knows."""

from .candidates import find_candidates
from .site import Bulk, Candidate, Consumer, Gather, GatheredAlias, Miss, Reduction, Site

__all__ = ["Bulk", "Candidate", "Consumer", "Gather", "GatheredAlias", "Miss", "Reduction", "Site", "find_candidates"]
