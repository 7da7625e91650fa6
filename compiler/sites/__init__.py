"""graph -> sites. One file a kind; each draws the op chains it knows."""

from .find import find
from .match import Bulk, Candidate, Consumer, Gather, Holder, Miss, Reduction, Site

__all__ = ["Bulk", "Candidate", "Consumer", "Gather", "Holder", "Miss", "Reduction", "Site", "find"]
