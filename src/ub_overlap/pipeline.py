"""Pipeline parallelism over ub_overlap: `ub_overlap.pipeline.Stage(..., group=ub_overlap.pipeline.make_group(mesh["pp"]))`."""

from __future__ import annotations

from ub_overlap.runtime.point_to_point.process_groups import BACKEND, make_group
from ub_overlap.runtime.point_to_point.stage import Stage

__all__ = ["BACKEND", "Stage", "make_group"]
