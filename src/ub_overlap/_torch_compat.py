"""The only file that names private parts of torch. Everything else imports them from here.

`_PRIVATE` maps our name to its locations in torch, oldest first (`_versions.py` has the supported ones). A name is resolved at
its first use, so importing this file does not import torch. APIs that need more than a name (a changed signature, say) have a
function below, which imports torch itself. `tests/test_torch_compat.py` resolves every name on the installed torch.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ub_overlap._versions import SUPPORTED_TORCH

_PRIVATE: dict[str, tuple[str, ...]] = {
    "check": ("torch:_check",),
    # compiler
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode",),
    "ShapeEnv": ("torch.fx.experimental.symbolic_shapes:ShapeEnv",),
    "size_functions": ("torch.utils._sympy.functions",),
    "aot_function": ("torch._functorch.aot_autograd:aot_function",),
    "decompositions": ("torch._inductor.decomposition:select_decomp_table",),
    "reparametrize_module": ("torch.nn.utils.stateless:_reparametrize_module",),
    "is_fake": ("torch._subclasses.fake_tensor:is_fake",),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor:unset_fake_temporarily",),
    "OpOverload": ("torch._ops:OpOverload",),
    "HigherOrderOperator": ("torch._ops:HigherOrderOperator",),
    "CheckpointPolicy": ("torch.utils.checkpoint:CheckpointPolicy",),
    "CustomGraphPass": ("torch._inductor.custom_graph_pass:CustomGraphPass",),
    "compiled_autograd": ("torch._dynamo.compiled_autograd",),
    "aot_autograd": ("torch._dynamo.backends.common:aot_autograd",),
    "InductorBackend": ("torch:_TorchCompileInductorWrapper",),
    "compile_fx": ("torch._inductor.compile_fx:compile_fx",),
    "compile_fx_inner": ("torch._inductor.compile_fx:compile_fx_inner",),
    "TracingContext": ("torch._guards:TracingContext",),
    "is_wrapper_subclass": ("torch.utils._python_dispatch:is_traceable_wrapper_subclass",),
    "InFlightTensor": ("torch.distributed._functional_collectives:AsyncCollectiveTensor",),
    "detect_fake_mode": ("torch._guards:detect_fake_mode",),
    "dynamo_config": ("torch._dynamo.config",),
    "InstructionTranslator": ("torch._dynamo.symbolic_convert:InstructionTranslator",),
    "InstructionTranslatorBase": ("torch._dynamo.symbolic_convert:InstructionTranslatorBase",),
    "dynamo_pgo": ("torch._dynamo.pgo",),
    "dynamo_entries": ("torch._dynamo.eval_frame:_debug_get_cache_entry_list",),
    "innermost_backend": ("torch._dynamo.eval_frame:innermost_backend",),
    "on_bytecode": ("torch._dynamo.convert_frame:register_bytecode_hook",),
    "DeletedGuards": ("torch._dynamo.guards:DeletedGuardManagerWrapper",),
    "extern_kernel_ir": ("torch._inductor.ir:ExternKernel",),
    "extern_kernels": ("torch._inductor.select_algorithm:extern_kernels",),
    "fallback_handler": ("torch._inductor.lowering:fallback_handler",),
    "force_stride_order": ("torch._inductor.inductor_prims:force_stride_order",),
    "cpp_wrapper": ("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu",),
    "cpp_vector_kernel": ("torch._inductor.codegen.cpp:CppVecKernel",),
    "deferred_line": ("torch._inductor.codegen.common:DeferredLine",),
    "inductor_config": ("torch._inductor.config",),
    "inductor_node": ("torch._inductor.scheduler:SchedulerNode",),
    "inductor_tiling": ("torch._inductor.tiling_utils",),
    "WeakDep": ("torch._inductor.dependencies:WeakDep",),
    "inductor_virtualized": ("torch._inductor.virtualized:V",),
    "list_mode_options": ("torch._inductor:list_mode_options",),
    "lowerings": ("torch._inductor.lowering:lowerings",),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners:min_cut_rematerialization_partition",),
    "register_lowering": ("torch._inductor.lowering:register_lowering",),
    "get_stride_order": ("torch._inductor.ir:get_stride_order",),
    "stable_topological_sort": ("torch._inductor.pattern_matcher:stable_topological_sort",),
    "trace_structured": ("torch._logging:trace_structured",),
    "tree_map_only": ("torch.utils._pytree:tree_map_only",),
    "tree_leaves": ("torch.utils._pytree:tree_leaves",),
    "make_boxed_func": ("functorch.compile:make_boxed_func",),
    "_get_hash_for_files": ("torch._inductor.custom_graph_pass:get_hash_for_files",),
    "_SymmetricMemory": ("torch._C._distributed_c10d:_SymmetricMemory",),
    "_DeviceType": ("torch._C._autograd:DeviceType",),
    "_detect_dma_connectivity": ("torch._C._distributed_c10d:_detect_dma_connectivity",),
    "_rendezvous": ("torch.distributed._symmetric_memory:rendezvous",),
    "scaled_mm": ("torch:_scaled_mm",),
    "get_carveout": ("torch._C:_get_sm_carveout_experimental",),
    "set_carveout": ("torch._C:_set_sm_carveout_experimental",),
    "_StorageWeakRef": ("torch.multiprocessing.reductions:StorageWeakRef",),
    "new_fake_group": ("torch.testing._internal.distributed.fake_pg:_create_fake_pg",),
    "new_named_group": ("torch.distributed.distributed_c10d:_new_process_group_helper",),
    "c10d_world": ("torch.distributed.distributed_c10d:_world",),
    "all_gather_with_gradient": ("torch.distributed._functional_collectives:all_gather_tensor_autograd",),
    "context_attention": ("torch.distributed.tensor.experimental._context_parallel._attention",),
    "DTensorSpec": ("torch.distributed.tensor._dtensor_spec:DTensorSpec",),
    "TensorMeta": ("torch.distributed.tensor._dtensor_spec:TensorMeta",),
    "all_to_all_with_gradient": ("torch.distributed._functional_collectives:all_to_all_single_autograd",),
    # torch.distributed.fsdp.fully_shard (FSDP2)
    "FSDPState": ("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",),
    "FSDPAllGather": ("torch.distributed.fsdp._fully_shard._fsdp_api:AllGather",),
    "FSDPReduceScatter": ("torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter",),
    "work_of_future": ("torch._C._distributed_c10d:_create_work_from_future",),
    "register_group": ("torch.distributed.distributed_c10d:_register_process_group",),
    "unregister_group": ("torch.distributed.distributed_c10d:_unregister_process_group",),
    "_group_size_by_name": ("torch.distributed.distributed_c10d:_get_group_size_by_name",),
}


def __getattr__(name: str) -> Any:
    """Resolve a private torch name. AttributeError if it is not listed, ImportError if this torch lacks it."""
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
        f"torch {torch.__version__} has {name!r} at none of {', '.join(_PRIVATE[name])}; "
        f"ub_overlap supports torch {SUPPORTED_TORCH}"
    )


def names() -> list[str]:
    """Return the private torch names that `__getattr__` resolves."""
    return sorted(_PRIVATE)


# --- compiler -----------------------------------------------------------------------------------------------------------


def fake_mode_of(value: Any) -> Any:
    """Return the FakeTensorMode of a node's meta["val"]. ValueError if it has none."""
    mode = __getattr__("detect_fake_mode")([value])
    if mode is None:
        raise ValueError(f"a graph value without a FakeTensorMode: got {type(value).__name__}, expected a FakeTensor")
    return mode


def is_in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs: what is compiled then is a backward without `tangents`."""
    return bool(getattr(__getattr__("compiled_autograd"), "in_compiled_autograd_region", False))


def range_of(size: Any) -> tuple[int, int | None]:
    """Return the lower and upper bound of a SymInt (upper None: unbounded)."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    least = int(bounds.lower) if bounds.lower.is_Integer else 0
    return least, int(bounds.upper) if bounds.upper.is_Integer else None


def symint_of(expression: Any, like: Any) -> Any:
    """Return the SymInt of an expression of sizes whose symbols are those of the SymInt `like`."""
    return like if like.node.expr == expression else like.node.shape_env.create_symintnode(expression, hint=None)


def hint_of(size: Any) -> int | None:
    """Return the value of a SymInt that decisions use: the user's hint (`mark_dynamic`), else the traced one, or None."""
    override = getattr(size.node.shape_env, "var_to_hint_override", {}).get(size.node.expr)
    value = getattr(size.node, "hint", None) if override is None else override
    return value if isinstance(value, int) else None


def group_size(name: str) -> int:
    """Return the number of ranks of the process group registered under `name`."""
    return int(__getattr__("_group_size_by_name")(name))


def inductor_option_names() -> frozenset[str]:
    """Return the names of torch._inductor.config, as torch.compile(options=) accepts them."""
    config = __getattr__("inductor_config")
    return frozenset(k.replace("-", "_") for k in config.get_config_copy())


def inductor_modes() -> list[str]:
    """Return the modes of torch.compile(mode=)."""
    return sorted(__getattr__("list_mode_options")())


def caches_off() -> Any:
    """Return a context in which Inductor's and AOTAutograd's caches are neither read nor written."""
    import contextlib

    import torch._functorch.config as functorch

    stack = contextlib.ExitStack()
    stack.enter_context(__getattr__("inductor_config").patch(fx_graph_cache=False))
    stack.enter_context(functorch.patch(enable_autograd_cache=False))
    return stack


def user_pass(name: str, options: dict[str, Any]) -> list[Any]:
    """Return the user's passes at Inductor's hook `name`, from their options or the global config."""
    value = options.get(name, getattr(__getattr__("inductor_config"), name))
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def inductor_option(name: str, options: dict[str, Any]) -> Any:
    """Return the value of Inductor's option in a compilation with `options`; None where this release does not have it."""
    return options.get(name, __getattr__("inductor_config").get_config_copy().get(name))


def roofline_ms(node: Any) -> float | None:
    """Return the milliseconds that Inductor's overlap scheduling estimates for a node; None in releases without that (2.11)."""
    scheduling = importlib.import_module("torch._inductor.fx_passes.overlap_scheduling")
    estimate = getattr(scheduling, "estimate_roofline_runtime_ms", None)
    return None if estimate is None else float(estimate(node))


def hash_of_files(paths: list[Any]) -> str:
    """Return one hash of the contents of files."""
    digest = __getattr__("_get_hash_for_files")(tuple(str(p) for p in paths))
    return digest.hex() if isinstance(digest, bytes) else str(digest)


def custom_graph_pass() -> type:
    """Return Inductor's base class of passes with a cache key."""
    return __getattr__("CustomGraphPass")


def chained(before: list[Any], own: Any) -> Any:
    """Return a pass for a hook of Inductor: the user's passes `before`, then ours. torch 2.11 accepts one pass, not a list."""
    return _Chain(before, own) if before else own


class _Chain:
    """Several passes as one CustomGraphPass. torch is imported when it is built."""

    def __new__(cls, before: list[Any], own: Any) -> Any:
        base = custom_graph_pass()

        class Chain(base):  # type: ignore[misc,valid-type]
            def __call__(self, graph: Any) -> None:
                for p in (*before, own):
                    p(graph)

            def uuid(self) -> Any:
                # Like torch, do not cache if a user's pass has no key.
                keys = [p.uuid() if isinstance(p, base) else None for p in (*before, own)]
                return None if any(k is None for k in keys) else tuple(keys)

        return Chain()


def group_ranks(name: str) -> list[int]:
    """Return the global ranks of the group `name`, in the order of their ranks in it."""
    import torch.distributed as dist

    return list(dist.get_process_group_ranks(group_of(name)))


def is_fake_group(name: str) -> bool:
    """Return whether the group `name` is torch's fake process group (one process simulates one of many ranks)."""
    import torch.distributed as dist

    return dist.get_backend(group_of(name)) == "fake"


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of the default group, or there is none."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def foreign_type(name: str) -> str:
    """Return the type of the group `name` where another library implements it, "" for c10d's own types."""
    kind = type(group_of(name))
    return "" if kind.__module__.split(".")[0] == "torch" else f"{kind.__module__}.{kind.__qualname__}"


# ---- runtime ---------------------------------------------------------------------------------------------------------------


def group_of(name: str) -> Any:
    """Return the c10d process group registered under `name`, the name that functional collectives use."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def global_ranks(group: Any) -> list[int]:
    """Return the ranks of the world that `group` has, in order; [] for a group that c10d does not know."""
    from torch.distributed import distributed_c10d

    return sorted(known, key=known.__getitem__) if (known := distributed_c10d._world.pg_group_ranks.get(group)) else []


def start_all_gather(out: Any, shard: Any, group: str) -> Any:
    """All-gather `shard` into `out`, in rank order, without the host overhead of torch.distributed's functions."""
    return group_of(group)._allgather_base(out, shard)


def start_reduce_scatter(out: Any, full: Any, group: str) -> Any:
    """Reduce-scatter `full` into `out`, with a sum."""
    return group_of(group)._reduce_scatter_base(out, full)


def timeout_of(group: Any, device: str) -> float | None:
    """Return the deadline of a group's collectives on a device type in seconds, None where its backend has none."""
    import torch

    try:
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def process_groups() -> list[Any]:
    """Return the c10d process groups of this process."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not (dist.is_available() and dist.is_initialized()):
        return []
    known: Any = distributed_c10d._world.pg_map
    return list(known)


def groups() -> list[str]:
    """Return "name:backend:size" of every c10d process group of this process."""
    import torch.distributed as dist

    return sorted(f"{g.group_name}:{dist.get_backend(g)}:{g.size()}" for g in process_groups())


def store_of(group: Any) -> Any:
    """Return the Store with which `group` was created. All its ranks share the keys."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def symmetric_empty(size: int, device: Any) -> Any:
    """Allocate `size` bytes of memory that peers can map, as a separate allocation."""
    import torch

    return __getattr__("_SymmetricMemory").empty_strided_p2p((size,), (1,), torch.uint8, device)


def symmetric_rendezvous(tensor: Any, group: str, apart: str = "") -> Any:
    """Map the ranks' tensors from `symmetric_empty`, of equal sizes, into each other's processes. Collective.

    `apart`: a name that is new to this group. Required if its ranks have completed unequal numbers of rendezvous: torch's keys
    contain that number, and this call counts it from 0."""
    if not apart:
        return __getattr__("_rendezvous")(tensor, group)
    from torch._C import _distributed_c10d as c10d

    from ub_overlap._recount import Recounted

    members, memory = group_of(group), __getattr__("_SymmetricMemory")
    name: Any = f"{group}/{apart}"
    store = Recounted(store_of(members), apart)
    _recounted.append(store)
    # torch looks up the Store of a name in a separate table (2.13) or through the process group of that name (2.11): set both.
    memory.set_group_info(name, members.rank(), members.size(), store)
    named = c10d.ProcessGroup(store, members.rank(), members.size())  # the registry does not keep it alive
    c10d._register_process_group(name, named)
    try:
        return memory.rendezvous(tensor, name)
    finally:
        c10d._unregister_process_group(name)


_recounted: list[Any] = []
"""References to Stores: C++ does not keep their Python half alive."""


def nvlinks() -> list[list[int]] | None:
    """Return NVLink counts between the visible GPUs, [i][j] by CUDA index. None if torch cannot report them."""
    try:
        found = __getattr__("_detect_dma_connectivity")(__getattr__("_DeviceType").CUDA, "nvlink").matrix
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return [[int(count) for count in row] for row in found]


def warms_up_cuda_graph(device_index: int) -> bool:
    """Return whether Inductor runs a graph of `device_index` in warmup, the last run before capture."""
    import sys

    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not hasattr(trees, "get_obj") or not hasattr(trees, "local"):
        return False
    try:
        container = trees.get_obj(trees.local, "tree_manager_containers").get(device_index)
    except (AttributeError, AssertionError, RuntimeError):  # a thread without a container
        return False
    return bool(getattr(getattr(container, "tree_manager", None), "in_warmup", False))


def is_computed_again(policy: Any) -> bool:
    """Return whether `policy` (node.meta["recompute"]) marks a checkpointed region of the user."""
    from torch.utils.checkpoint import CheckpointPolicy

    return policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def storage_id(tensor: Any) -> int:
    """Return an id of a tensor's storage. Resizing keeps it.

    A new storage may get the id of a freed one, unless a `weak_storage` of the old one exists."""
    return tensor.untyped_storage()._cdata


def weak_storage(tensor: Any) -> Any:
    """Return a weak reference to a tensor's storage. `expired()` is True once the storage is freed."""
    return __getattr__("_StorageWeakRef")(tensor.untyped_storage())


_SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
    15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn", 25: "float8_e5m2fnuz", 26: "float8_e4m3fnuz",
}  # fmt: skip
"""Names of dtypes by the numbers of c10/core/ScalarType.h. torch's own table, in torch.distributed._symmetric_memory (2.11 to
2.15), has other numbers for float8."""


def dtypes(given: Any) -> list[Any]:
    """Return the dtypes of a ScalarType[] argument of a Python kernel: some dispatcher paths pass them as integers."""
    import torch

    return [getattr(torch, _SCALAR_TYPES[value]) if isinstance(value, int) else value for value in given]


def keeps_listed_strides() -> bool:
    """Return whether Inductor keeps the order of strides of tensors in list arguments, which torch 2.11 does not."""
    import torch

    return torch.__version__.split(".")[:2] not in (["2", "11"], ["2", "12"])


def device_types(group: Any) -> list[str]:
    """Return the device types that the backends of `group` support."""
    return sorted({device.type for device in group._device_types})


@functools.cache
def cpu_scales_rows() -> bool:
    """Return whether torch._scaled_mm supports per-row scales on the CPU. torch 2.11 supports per-tensor scales only."""
    import torch

    q, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(q, q.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
