"""The only file that names private parts of torch. Everything else imports them from here.

`_PRIVATE` maps our name to where torch keeps it, oldest place first when it moved (supported: torch 2.11 to 2.15); the name is
resolved at its first use, so importing this file imports no torch. What needs more than a name (a changed signature, say) is a
function below, with its torch imports inside. `tests/test_torch_compat.py` resolves every name on the installed torch.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_PRIVATE: dict[str, tuple[str, ...]] = {
    "check": ("torch:_check",),
    # compiler
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode",),
    "OpOverload": ("torch._ops:OpOverload",),
    "CustomGraphPass": ("torch._inductor.custom_graph_pass:CustomGraphPass",),
    "aot_autograd": ("torch._dynamo.backends.common:aot_autograd",),
    "compile_fx": ("torch._inductor.compile_fx:compile_fx",),
    "detect_fake_mode": ("torch._guards:detect_fake_mode",),
    "dynamo_config": ("torch._dynamo.config",),
    "extern_kernels": ("torch._inductor.select_algorithm:extern_kernels",),
    "force_stride_order": ("torch._inductor.inductor_prims:force_stride_order",),
    "inductor_config": ("torch._inductor.config",),
    "inductor_node": ("torch._inductor.scheduler:SchedulerNode",),
    "inductor_virtualized": ("torch._inductor.virtualized:V",),
    "list_mode_options": ("torch._inductor:list_mode_options",),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners:min_cut_rematerialization_partition",),
    "stable_topological_sort": ("torch._inductor.pattern_matcher:stable_topological_sort",),
    "trace_structured": ("torch._logging:trace_structured",),
    "tree_leaves": ("torch.utils._pytree:tree_leaves",),
    "make_boxed_func": ("functorch.compile:make_boxed_func",),
    "_get_hash_for_files": ("torch._inductor.custom_graph_pass:get_hash_for_files",),
    "_SymmetricMemory": ("torch._C._distributed_c10d:_SymmetricMemory",),
    "_DeviceType": ("torch._C._autograd:DeviceType",),
    "_detect_dma_connectivity": ("torch._C._distributed_c10d:_detect_dma_connectivity",),
    "_rendezvous": ("torch.distributed._symmetric_memory:rendezvous",),
    "scaled_mm": ("torch:_scaled_mm",),
    "_graph_task": ("torch._C:_current_graph_task_id",),
    "_StorageWeakRef": ("torch.multiprocessing.reductions:StorageWeakRef",),
    "_dtypes_of_numbers": ("torch.distributed._symmetric_memory:_maybe_convert_scalar_types_to_dtypes",),
    "_group_size_by_name": ("torch.distributed.distributed_c10d:_get_group_size_by_name",),
}


def __getattr__(name: str) -> Any:
    """Resolve a private torch name. AttributeError for one not listed, ImportError for one that this torch does not have."""
    if name not in _PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: list it in _PRIVATE")
    for place in _PRIVATE[name]:
        module, _, attribute = place.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in attribute.split(".") if attribute else ():
                value = getattr(value, part)
        except (ImportError, AttributeError):
            continue
        globals()[name] = value
        return value
    import torch

    raise ImportError(
        f"torch {torch.__version__} has {name!r} at none of {', '.join(_PRIVATE[name])}; ub_overlap supports torch 2.11 to 2.15"
    )


def names() -> list[str]:
    """The private torch names that `__getattr__` resolves."""
    return sorted(_PRIVATE)


# --- compiler -----------------------------------------------------------------------------------------------------------


def fake_mode_of(value: Any) -> Any:
    """The FakeTensorMode that a node's meta["val"] lives in."""
    mode = __getattr__("detect_fake_mode")([value])
    if mode is None:
        raise ValueError(f"a graph value without a FakeTensorMode: got {type(value).__name__}, expected a FakeTensor")
    return mode


def range_of(size: Any) -> tuple[int, int | None]:
    """The least and the largest value (None: any) that a SymInt may have."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    least = int(bounds.lower) if bounds.lower.is_Integer else 0
    return least, int(bounds.upper) if bounds.upper.is_Integer else None


def group_size(name: str) -> int:
    """Ranks of the process group registered under `name`."""
    return int(__getattr__("_group_size_by_name")(name))


def inductor_option_names() -> frozenset[str]:
    """Names of torch._inductor.config, as torch.compile(options=) takes them."""
    config = __getattr__("inductor_config")
    return frozenset(k.replace("-", "_") for k in config.get_config_copy())


def inductor_modes() -> list[str]:
    """The modes that torch.compile(mode=) knows."""
    return sorted(__getattr__("list_mode_options")())


def caches_off() -> Any:
    """A context in which compiled graphs are neither looked up in Inductor's and AOTAutograd's caches nor put there."""
    import contextlib

    import torch._functorch.config as functorch

    stack = contextlib.ExitStack()
    stack.enter_context(__getattr__("inductor_config").patch(fx_graph_cache=False))
    stack.enter_context(functorch.patch(enable_autograd_cache=False))
    return stack


@functools.cache
def never_reused(op: Any) -> None:
    """Tells Inductor that what `op` returns is not its own: it must not compute anything else into that memory."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    lower, virtualized = fallback_handler(op), __getattr__("inductor_virtualized")

    def kept(*args: Any, **kwargs: Any) -> Any:
        outputs = lower(*args, **kwargs)
        for output in __getattr__("tree_leaves")(outputs):
            virtualized.graph.never_reuse_buffers.add(output.get_name())
        return outputs

    register_lowering(op, type_promotion_kind=None)(kept)


@functools.cache
def mend_fused_reads() -> None:
    """Inductor's CPU kernels: a node whose loops are rearranged for fusion still reads what a collective wrote in place.
    torch 2.11 to 2.13 forget that it is another version of the buffer, and may run the node before the collective: a float8
    cast would be scaled by the largest of one rank."""
    node = __getattr__("inductor_node")
    recompute = node.recompute_size_and_body

    def mended(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    node.recompute_size_and_body = mended


def user_pass(name: str, options: dict[str, Any]) -> list[Any]:
    """The user's own passes at Inductor's hook `name`, from their options or the global config, as a list."""
    value = options.get(name, getattr(__getattr__("inductor_config"), name))
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def must_recompute() -> Any:
    """The tag in node.meta["recompute"] that makes the partitioner compute a node again in backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_RECOMPUTE


def must_save() -> Any:
    """The tag in node.meta["recompute"] that makes the partitioner keep a node's value for backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE


def hash_of_files(paths: list[Any]) -> str:
    """One hash over the contents of files."""
    digest = __getattr__("_get_hash_for_files")(tuple(str(p) for p in paths))
    return digest.hex() if isinstance(digest, bytes) else str(digest)


def custom_graph_pass() -> type:
    """Inductor's base class of passes with a cache key."""
    return __getattr__("CustomGraphPass")


def dtensor_input(node: Any) -> int | None:
    """Which input of Dynamo's graph is the DTensor whose local tensor a placeholder of a joint graph takes; None for others."""
    desc = node.meta.get("desc")
    return getattr(desc.base, "idx", None) if getattr(desc, "attr", None) == "_local_tensor" else None


def graph_input(node: Any) -> int | None:
    """Which input of Dynamo's graph a placeholder of a joint graph takes, itself or its local tensor; None for others."""
    desc = node.meta.get("desc")
    return getattr(desc, "idx", None) if dtensor_input(node) is None else dtensor_input(node)


def chained(before: list[Any], own: Any) -> Any:
    """What a hook of Inductor takes to run the user's passes `before` and then ours (torch 2.11 takes one pass, not a list)."""
    return _Chain(before, own) if before else own


class _Chain:
    """Several passes as one, made a CustomGraphPass when it is first built (torch is imported then)."""

    def __new__(cls, before: list[Any], own: Any) -> Any:
        base = custom_graph_pass()

        class Chain(base):  # type: ignore[misc,valid-type]
            def __call__(self, graph: Any) -> None:
                for p in (*before, own):
                    p(graph)

            def uuid(self) -> Any:
                # A user's pass without a key has none: like torch, do not cache then.
                keys = [p.uuid() if isinstance(p, base) else None for p in (*before, own)]
                return None if any(k is None for k in keys) else tuple(keys)

        return Chain()


def is_fake_group(name: str) -> bool:
    """Is the group registered under `name` torch's fake process group (one process that plays one of many ranks)?"""
    import torch.distributed as dist

    return dist.get_backend(group_of(name)) == "fake"


# ---- runtime ---------------------------------------------------------------------------------------------------------------


def group_of(name: str) -> Any:
    """The c10d process group registered under `name`, as c10d and the functional collectives know it."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def gather_into(out: Any, shard: Any, group: str) -> None:
    """all_gather of `shard` into `out`, shard after shard; without what torch.distributed's own functions add for the host."""
    group_of(group)._allgather_base(out, shard).wait()


def scatter_into(out: Any, whole: Any, group: str) -> None:
    """reduce_scatter of `whole` into `out`, summed."""
    group_of(group)._reduce_scatter_base(out, whole).wait()


def groups() -> list[str]:
    """Name, backend and size of every c10d process group of this process."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not (dist.is_available() and dist.is_initialized()):
        return []
    known: Any = distributed_c10d._world.pg_map
    return sorted(f"{g.group_name}:{dist.get_backend(g)}:{g.size()}" for g in known)


def store_of(group: Any) -> Any:
    """The Store through which `group` was made: all its ranks see the same keys in it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def symmetric_empty(size: int, device: Any) -> Any:
    """`size` bytes of memory that peers can map, an allocation of its own."""
    import torch

    return __getattr__("_SymmetricMemory").empty_strided_p2p((size,), (1,), torch.uint8, device)


def symmetric_rendezvous(tensor: Any, group: str, apart: str = "") -> Any:
    """Map the ranks' tensors, made by `symmetric_empty` with equal sizes, into each other's processes. Collective.

    `apart`: a name that this group has not used before, where its ranks have been through unequal numbers of rendezvous: then
    torch's keys, which carry that number, are counted from here on."""
    if not apart:
        return __getattr__("_rendezvous")(tensor, group)
    from torch._C import _distributed_c10d as c10d

    from ub_overlap._recount import Recounted

    members, memory = group_of(group), __getattr__("_SymmetricMemory")
    name: Any = f"{group}/{apart}"
    store = Recounted(store_of(members), apart)
    _recounted.append(store)
    # torch finds a name's Store in a table of its own (2.13) or through the process group of that name (2.11): it gets both.
    memory.set_group_info(name, members.rank(), members.size(), store)
    named = c10d.ProcessGroup(store, members.rank(), members.size())  # the registry does not keep it
    c10d._register_process_group(name, named)
    try:
        return memory.rendezvous(tensor, name)
    finally:
        c10d._unregister_process_group(name)


_recounted: list[Any] = []
"""C++ does not keep the Python half of a Store alive."""


def nvlinks() -> list[list[int]] | None:
    """NVLinks between the GPUs that this process sees, [i][j] by CUDA index; None where this torch or machine cannot tell."""
    try:
        found = __getattr__("_detect_dma_connectivity")(__getattr__("_DeviceType").CUDA, "nvlink").matrix
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return [[int(count) for count in row] for row in found]


def warms_up_cuda_graph(device_index: int) -> bool:
    """Is Inductor running a graph of `device_index` for the last time before it captures it?"""
    import sys

    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not hasattr(trees, "get_obj") or not hasattr(trees, "local"):
        return False
    try:
        container = trees.get_obj(trees.local, "tree_manager_containers").get(device_index)
    except (AttributeError, AssertionError, RuntimeError):  # a thread that has none
        return False
    return bool(getattr(getattr(container, "tree_manager", None), "in_warmup", False))


def is_computed_again(policy: Any) -> bool:
    """Is `policy` (node.meta["recompute"]) that of a region that the user checkpoints?"""
    from torch.utils.checkpoint import CheckpointPolicy

    return policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def in_backward() -> bool:
    """Does this thread run inside autograd's backward?"""
    return __getattr__("_graph_task")() != -1


def storage_id(tensor: Any) -> int:
    """Names the memory that a tensor lies in, also while that is resized; another one's once it is gone and no weak_storage is
    kept."""
    return tensor.untyped_storage()._cdata


def weak_storage(tensor: Any) -> Any:
    """A reference that does not keep the memory alive. `expired()` is True once no other reference does."""
    return __getattr__("_StorageWeakRef")(tensor.untyped_storage())


def dtypes(given: Any) -> list[Any]:
    """A ScalarType[] as a Python kernel gets it: on some ways through the dispatcher dtypes have become their numbers."""
    return list(given) if not any(isinstance(value, int) for value in given) else __getattr__("_dtypes_of_numbers")(given)


def device_types(group: Any) -> list[str]:
    """The device types that the backends of `group` serve."""
    return sorted({device.type for device in group._device_types})


@functools.cache
def cpu_scales_rows() -> bool:
    """Does torch._scaled_mm take a scale a row on the CPU? torch 2.11 takes one a tensor alone."""
    import torch

    q, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(q, q.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
