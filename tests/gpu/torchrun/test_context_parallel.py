"""Context parallelism in fp32 with torch's kernels of GPUs: training on parts of a sequence is training on the whole one."""

from __future__ import annotations

import pytest
import torch

from tests.context_parallel.rank_attention import compare_forms
from tests.gpu.lockstep import Lockstep
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.runtime.session import session

SPLIT = {"overlap": "off", "overrides": [{"strategy": "split"}]}
FORMS = {
    "gathered": ("gathered", "", False, False),
    "flex_op": ("flex_op", "", False, False),
    "ulysses": ("ulysses", "", False, True),
    "ring": ("sdpa", "allgather", False, True),
    "ring balanced": ("sdpa", "allgather", True, True),
    "ring all_to_all": ("sdpa", "alltoall", True, True),
}


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", FORMS)
def test_forms(lockstep: Lockstep, name: str) -> None:
    """Every exchange is split; with overlap="off" FlexAttention's op stays, and says so.

    Inductor compiles what is left: without it, torch 2.11 runs rms_norm as one kernel, whose gradient has other strides than
    it was traced with.
    """
    form, rotation, load_balance, causal = FORMS[name]
    if form == "ulysses" and 4 % lockstep.ranks:
        pytest.skip(f"4 heads do not divide by {lockstep.ranks} ranks")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    options = SPLIT if lockstep.cuda else SPLIT | {"inner": "aot_eager"}
    if rotation == "alltoall":  # only where steps are merged do all ranks send as many messages
        options = options | {"overlap": "auto"}
    error, plans = compare_forms(
        lockstep.rank, lockstep.ranks, form, options, rotation, load_balance, causal, device=lockstep.device_type
    )
    lockstep.sync()
    session.check()
    assert error < 1e-4
    strategies = {str(d.strategy) for plan in plans for d in plan.decisions if d.strategy.mode is not Mode.MERGED}
    assert strategies == ({"none"} if form == "flex_op" else {"split"})
    lockstep.note(f"{sum(len(plan.decisions) for plan in plans)} split, error {error:.1e}")
