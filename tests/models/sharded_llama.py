"""The Llama of examples/llama_tp with sharded parameters that are gathered in the graph, alone and with tensor parallelism.

`source`: "example" shards by examples/fsdp_tp, "torchtitan" by torchtitan's SimpleFSDP. Ranks of one tensor-parallel group have
the same tokens. Legend: N replicas.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.models.absent import stand_ins
from tests.models.case import Case, Expected, device, settle
from tests.models.torchtitan_llama import UNUSED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMETERS = 12
"""Of a model of one layer."""
_UNSHARDS = (
    torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.aten._to_copy.default,
)  # fmt: skip


def _gather_again(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in _UNSHARDS else CheckpointPolicy.MUST_SAVE


def resharding(computation: Any) -> Any:
    """Return SimpleFSDP's module that gathers a parameter, with its former checkpoint policy: backward gathers again."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _gather_again)

    class Resharding(computation):  # type: ignore[misc]
        def replicate_compute(self, x: Any) -> Any:
            return checkpoint(super().replicate_compute, x, use_reentrant=False, context_fn=contexts)

    return Resharding


def data_parallel(reshard: bool = False) -> tuple[Any, Any]:
    """Return torchtitan's data_parallel and its MixedPrecisionPolicy. `reshard`: parameters are freed after the forward."""
    import torch._inductor.compile_fx  # noqa: F401  (before the stand-ins: Inductor looks for Triton itself)
    from torch._subclasses.fake_tensor import FakeTensorMode

    init = FakeTensorMode.__init__
    with stand_ins(*UNUSED):
        from torchtitan.experiments.graph_trainer import simple_fsdp
    FakeTensorMode.__init__ = init  # torchtitan patches it for the whole process
    simple_fsdp._wrap_class_cache.clear()  # a class keeps the mesh and the types that it was first made with
    shard = simple_fsdp.data_parallel
    if reshard:
        shard = patch.object(simple_fsdp, "ReplicateComputation", resharding(simple_fsdp.ReplicateComputation))(shard)
    return shard, simple_fsdp.MixedPrecisionPolicy


def meshes(source: str, mode: str, world: int, tp: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of data parallelism as `source` expects it, and the mesh of tensor parallelism.

    With hybrid_shard there are 2 replicas of the shards. Tensor-parallel ranks are neighbors.
    """
    is_hybrid = mode == "hybrid_shard"
    sizes = {"replicate": 2 if is_hybrid else 1, "dp": world // tp // (2 if is_hybrid else 1), "tp": tp}
    data = ("replicate", "dp") if is_hybrid else ("dp",)
    if source == "torchtitan" or tp == 1:
        names = (*data, "tp") if tp > 1 else data
        whole = init_device_mesh(device().type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        return whole[data], whole["tp"] if tp > 1 else None
    ranks = torch.arange(world).view(*sizes.values()).permute(2, 0, 1)
    ranks = (ranks if is_hybrid else ranks[:, 0]).contiguous()
    whole = DeviceMesh(device().type, ranks, mesh_dim_names=("tp", *data))
    return whole, whole["tp"]


def build(
    rank: int,
    world: int,
    source: str = "example",
    mode: str = "fully_shard",
    tp: int = 1,
    mixed: bool = False,
    reshard: bool = False,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build the model. `mode`: as of torchtitan. `mixed`: parameters gathered in bf16, gradients reduced in `dtype`.

    `reshard`: torchtitan's parameters are marked to be gathered again in backward.
    """
    for folder in ("llama_tp", "fsdp_tp"):
        if str(EXAMPLES / folder) not in sys.path:
            sys.path.append(str(EXAMPLES / folder))
    from in_graph_shards import shard_parameters
    from model import ModelArgs, Transformer
    from parallelize import parallelize

    mesh, tp_mesh = meshes(source, mode, world, tp)
    model = Transformer(ModelArgs(dim=64, num_layers=1, hidden_dim=96, vocab_size=160, max_seq_len=16))
    model.init_weights(7)
    model = settle(model, dtype, exact)
    if tp_mesh is not None:
        parallelize(model, tp_mesh)
    low = (torch.float64 if exact else torch.bfloat16) if mixed else None
    high = (torch.float64 if exact else dtype) if mixed else None
    if source == "torchtitan":
        shard, policy = data_parallel(reshard)
        shard(model, mesh, mode=mode, mp_policy=policy(param_dtype=low, reduce_dtype=high))
    else:
        shard_parameters(model, mesh, low, high)
    tokens = torch.randint(160, (2, 16), generator=torch.Generator().manual_seed(11 + rank // tp)).to(device())
    return Case(model, (tokens,), Expected(), dynamic=dynamic)
