"""Context parallelism with torch's kernels of GPUs: training on parts of a sequence is training on the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.context_parallel.rank_attention import WIDTH, compare_forms, difference
from tests.context_parallel.rank_attention import train as train_once
from tests.context_parallel.rank_programs import compare_flex_attention
from tests.gpu.cases import BF16, F32
from tests.gpu.lockstep import Lockstep
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.session import session

SPLIT: dict[str, Any] = {"overlap": "off", "overrides": [{"strategy": "split"}]}
FORMS = {
    "gathered": ("gathered", "", False, False),
    "flex_op": ("flex_op", "", False, False),
    "ulysses": ("ulysses", "", False, True),
    "ring": ("sdpa", "allgather", False, True),
    "ring balanced": ("sdpa", "allgather", True, True),
    "ring all_to_all": ("sdpa", "alltoall", True, True),
}


def strategies(plans: list[Plan]) -> set[str]:
    return {str(d.strategy) for plan in plans for d in plan.decisions if d.strategy.mode is not Mode.MERGED}


def train(lockstep: Lockstep, name: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[float, list[Plan]]:
    """Return the error and the plans of a form."""
    form, rotation, load_balance, causal = FORMS[name]
    if form == "ulysses" and 4 % lockstep.ranks:
        pytest.skip(f"4 heads do not divide by {lockstep.ranks} ranks")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    if rotation == "alltoall":  # only where steps are merged do all ranks send as many messages
        options = options | {"overlap": "auto"}
    found = compare_forms(
        lockstep.rank, lockstep.ranks, form, options, rotation, load_balance, causal, device=lockstep.device_type, dtype=dtype
    )
    lockstep.sync()
    session.check()
    return found


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", FORMS)
def test_forms(lockstep: Lockstep, name: str) -> None:
    """Every exchange is split; with overlap="off" FlexAttention's op stays, and says so."""
    options = SPLIT if lockstep.cuda else SPLIT | {"inner": "aot_eager"}
    error, plans = train(lockstep, name, options, F32)
    assert error < 1e-4
    assert strategies(plans) == ({"none"} if name == "flex_op" else {"split"})
    lockstep.note(f"{sum(len(plan.decisions) for plan in plans)} split, error {error:.1e}")


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", FORMS)
def test_bits(lockstep: Lockstep, name: str) -> None:
    """The same kernels in the same order give the bits of the eager program, output and gradients: so flash attention does
    with deterministic algorithms."""
    options = SPLIT | {"overlap": "auto", "inner": "aot_eager"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            error, plans = train(lockstep, name, options, BF16 if lockstep.cuda else F32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert error < 5e-2
    assert strategies(plans) == {"split"}


class Heads(nn.Module):
    """Attention on part of a sequence [1, S / R, WIDTH], whose heads and positions DTensor exchanges (Ulysses)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.wq, self.wo = mesh, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def exchange(self, x: Tensor, dim: int, to: int) -> Tensor:
        part = DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False)
        return part.redistribute(self.mesh, [Shard(to)]).to_local()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.exchange(self.wq(x).unflatten(2, (4, -1)), 1, 2).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
        return self.wo(self.exchange(out, 2, 1).flatten(2))


@pytest.mark.deadline(120)
def test_heads_that_dtensor_exchanges(lockstep: Lockstep) -> None:
    """A redistribution from positions to heads, and back, is an exchange that is split."""
    if not lockstep.cuda:
        pytest.skip("_dtensor.shard_dim_alltoall has no kernel for the CPU")
    if 4 % lockstep.ranks:
        pytest.skip(f"4 heads do not divide by {lockstep.ranks} ranks")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = Heads(init_device_mesh("cuda", (lockstep.ranks,))).to(lockstep.device)
    x = torch.randn(1, 64, WIDTH, device=lockstep.device)
    eager = train_once(model, model, x)
    model.zero_grad(set_to_none=True)
    mark = HISTORY.mark()
    options = SPLIT | {"overlap": "auto"}  # "off" leaves DTensor's op whole
    found = train_once(torch.compile(model, backend="ub_overlap", options=options, fullgraph=True), model, x)
    lockstep.sync()
    session.check()
    error = max(difference(a, b) for a, b in zip(found, eager, strict=True))
    assert error < 1e-5
    kinds = [[f"{d.kind.value} {d.strategy}" for d in plan.decisions] for plan in HISTORY.since(mark)]
    assert kinds == [["all_to_all split"] * 2] * 2
    lockstep.note(f"error {error:.1e}")


@pytest.mark.deadline(120)
@pytest.mark.parametrize("load_balance", [True, False])
def test_flex_attention(lockstep: Lockstep, load_balance: bool) -> None:
    """Gathers of keys and values, and reduce_scatters of their gradients, are split next to FlexAttention's kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    options = SPLIT | {"overlap": "auto"} | ({} if lockstep.cuda else {"inner": "aot_eager"})
    error, plans = compare_flex_attention(lockstep.rank, lockstep.ranks, options, load_balance, lockstep.device_type)
    lockstep.sync()
    session.check()
    assert error < 1e-4
    kinds = [sorted(f"{d.kind.value} {d.strategy}" for d in plan.decisions) for plan in plans]
    assert kinds == [["all_gather split"] * 2, ["reduce_scatter split"] * 2]
    lockstep.note(f"error {error:.1e}")
