"""The bytes of a report are the bytes that the session counted, with float8 on the wire and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fp8.rank_fp8 import E4M3, scaled, scattered
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import site_stats


def sent_bytes(rank: int, world: int, columns: int, reduced: bool) -> tuple[str, str, int, int]:
    """Return (wire dtype of the decision, of its sizes, its bytes, the bytes copied) of one scattered sum."""
    draw = torch.Generator().manual_seed(9 + rank)
    x, w = (torch.randn(n, 32, generator=draw).to(E4M3) for n in (32, columns))
    one = torch.ones(())

    def function(x: Tensor, w: Tensor) -> Tensor:
        return scattered(scaled(x, w.t(), one, one))

    torch._dynamo.reset()
    known = HISTORY.mark()
    with uncached():
        torch.compile(
            function,
            backend="ub_overlap",
            options={"overlap": "force", "inner": "aot_eager", "fp8": {"products": "off", "reduce_scatter": reduced}},
        )(x, w)
    (plan,) = HISTORY.since(known)
    assert Plan.from_json(plan.to_json()) == plan
    (d,) = (d for d in plan.decisions if d.overlapped)
    assert d.work is not None and d.bytes is not None
    return d.wire_dtype, d.work.wire_dtype, d.bytes, site_stats()[str(SiteId(plan.digest, d.id))].bytes_copied


@pytest.mark.parametrize(
    ("columns", "reduced", "wire", "sent"),
    [(256, True, "float8", 16 * (256 + 2 * 4)), (256, False, "", 16 * 256 * 2), (96, True, "", 16 * 96 * 2)],
)
def test_reported_bytes_are_the_counted_bytes(pool2: RankPool, columns: int, reduced: bool, wire: str, sent: int) -> None:
    """A float8 wire sends a byte an element and 4 bytes for 128 columns; 96 columns are no whole segments."""
    for outcome in pool2.run(sent_bytes, columns, reduced):
        assert outcome == (wire, wire, sent, sent)
