"""graph + plan -> graph."""

from .rewrite_graph import rewrite

__all__ = ["rewrite"]
