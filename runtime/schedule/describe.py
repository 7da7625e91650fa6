"""Draw a schedule as text: time runs down, one lane per queue, and events as small numbers.

::

    matmul_reduce_scatter, rank 0 of 2, 2 chunks
      #  COMPUTE                        COPY
      0  Compute 0 -> PARTIAL@0[1]  (0)  .
      1  .                              Wait DONE@0 from 1 #0 of epoch e-2
      2  .                              after 0: Copy PARTIAL@0[1] -> LANDING@1[0]
      3  .                              Signal READY@1 from 0 #0  (1)
      4  Compute 0 -> PARTIAL@0[0]       .

``(0)`` records event 0, ``after 0:`` waits for it.
"""

from __future__ import annotations

from .effects import show
from .steps import Queue, Schedule, Step


def describe(schedule: Schedule) -> str:
    """Draw one rank's schedule."""
    key = schedule.key
    chunks = f"{key.chunks} chunks" if key.chunks else "one piece per rank"
    cells = [(step.queue, _cell(step)) for step in schedule.steps]
    width = max([len("COMPUTE"), *(len(cell) for queue, cell in cells if queue is Queue.COMPUTE)])
    lines = [f"{key.kind}, rank {schedule.rank} of {key.ranks}, {chunks}", f"{'#':>3}  {'COMPUTE':<{width}}  COPY"]
    for place, (queue, cell) in enumerate(cells):
        compute, copy = (cell, ".") if queue is Queue.COMPUTE else (".", cell)
        lines.append(f"{place:>3}  {compute:<{width}}  {copy}")
    return "\n".join(lines)


def _cell(step: Step) -> str:
    after = f"after {', '.join(map(str, step.after))}: " if step.after else ""
    record = f"  ({step.record})" if step.record is not None else ""
    return f"{after}{show(step)}{record}"
