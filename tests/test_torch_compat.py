"""Tests that every private torch name used by the package exists on the installed torch."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ub_overlap import _fsdp_compat, _torch_compat


@pytest.mark.parametrize("name", _torch_compat.names())
def test_name_resolves(name: str) -> None:
    assert getattr(_torch_compat, name) is not None


def test_unlisted_name() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = _torch_compat.no_such_name


def test_a_name_that_this_torch_lacks_names_the_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_torch_compat._PRIVATE, "gone", ("torch._nowhere:gone", "torch:gone"))
    with pytest.raises(ImportError, match=r"torch 2\.\d+.*'gone' at none of torch\._nowhere:gone, torch:gone"):
        _ = _torch_compat.gone


def test_imports_of_torch_are_inside_functions() -> None:
    """Importing ub_overlap, and through it _torch_compat.py, must not import torch."""
    for line in inspect.getsource(_torch_compat).splitlines():
        assert not line.startswith(("import torch", "from torch")), line


def test_public_setters_of_fully_shard_set_what_we_replace() -> None:
    dist.init_process_group("fake", store=_torch_compat.FakeStore(), rank=0, world_size=2)
    try:
        module = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(module, FSDPModule)
        gather, scatter = object(), object()
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        (group,) = _fsdp_compat.param_groups(module)
        assert _fsdp_compat.comms(group) == (gather, scatter)
        _fsdp_compat.set_comms(group, scatter, gather)
        assert _fsdp_compat.comms(group) == (scatter, gather)
        assert hasattr(group, "offload_policy")
        assert _fsdp_compat.gather_group(group).size() == 2
        assert _fsdp_compat.unsharded_parameters(group) == [], "no gather has run"
        _fsdp_compat.accumulate_in_reduce_dtype(group)
        assert all(hasattr(p, "unsharded_param") for p in map(type, group.fsdp_params))
    finally:
        dist.destroy_process_group()


def test_factor_of_a_premultiplied_sum() -> None:
    premul = getattr(dist.ReduceOp, "PREMUL_SUM")  # noqa: B009 (an enum value in torch 2.11, where this makes the op)
    old = getattr(torch.distributed, "_make_nccl_premul_sum", None)
    assert _fsdp_compat.premul_factor(old(0.25) if old is not None else premul(0.25)) == 0.25
    assert _fsdp_compat.premul_factor(dist.ReduceOp.SUM) is None
    assert _fsdp_compat.premul_factor(dist.ReduceOp(dist.ReduceOp.AVG)) is None


def number_of(x: torch.Tensor) -> int:
    """As TorchScript it returns the number of the dtype."""
    return x.dtype  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dtypes_of_numbers() -> None:
    """Integers that a dispatcher passes for dtypes are read as torch numbers them, float8 too."""
    number = torch.jit.script(number_of)
    dtypes = [getattr(torch, name) for name in _torch_compat._SCALAR_TYPES.values()]
    numbers = [number(torch.empty(0, dtype=dtype)) for dtype in dtypes]
    assert all(isinstance(n, int) for n in numbers) and torch.float8_e4m3fn in dtypes
    assert _torch_compat.dtypes([*numbers, torch.float16]) == [*dtypes, torch.float16]
