"""Pipeline parallelism over ub_overlap: `PipelineStage(..., group=ub_overlap.pipeline.make_group(mesh["pp"]))`."""

from __future__ import annotations

from ub_overlap.runtime.point_to_point.process_groups import BACKEND, make_group

__all__ = ["BACKEND", "make_group"]
