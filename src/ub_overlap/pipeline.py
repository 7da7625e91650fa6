"""Pipeline parallelism over ub_overlap's transport: `PipelineStage(..., group=ub_overlap.pipeline.make_group(mesh["pp"]))`."""

from __future__ import annotations

from ub_overlap.runtime.point_to_point.process_groups import make_group

__all__ = ["make_group"]
