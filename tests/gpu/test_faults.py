"""The fault matrix on GPUs (tests/soak/fault_matrix.py): all cases share the GPUs, four at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.conftest import ranks_of_this_machine
from tests.soak.fault_matrix import Fault, FaultRuns, list_faults


@pytest.fixture(scope="module")
def gpu_runs(request: pytest.FixtureRequest) -> FaultRuns:
    """Run the selected faults on all GPUs, four at a time, with a deadline of 4 s."""
    chosen = [item.callspec.params["fault"] for item in request.session.items if item.function is test_fault]  # type: ignore[attr-defined]
    return FaultRuns(chosen, "cuda", ranks_of_this_machine(), 4.0, 4)


QUICK = {fault.name for fault in list_faults("cuda", quick=True)}


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f.name in QUICK else pytest.mark.full) for f in list_faults("cuda")],
    ids=lambda fault: fault.name,
)
def test_fault(ranks: int, gpu_runs: FaultRuns, fault: Fault, record_property: Any) -> None:
    wrong, measured = gpu_runs.result(fault)
    record_property("measured", measured)
    assert not wrong, wrong
    print(measured)
