"""ub_overlap.pack: put sibling weights next to each other in memory, so that packed operands need no copy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .errors import OptionError
from .packed_mark import MARK

log = logging.getLogger("ub_overlap")

SIBLINGS = (("wq", "wk", "wv"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears that read the same input, in Llama and in Hugging Face's models."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Weights next to each other in memory: the path of their module, the names of the linears, and their bytes."""

    module: str
    names: tuple[str, ...]
    bytes: int


@torch.no_grad()
def pack(model: nn.Module, groups: Sequence[Sequence[str]] | None = None) -> list[PackedGroup]:
    """Put the weights of sibling linears next to each other in memory, in place, and return the groups that lie so.

    `groups`: names of linears of one module that read the same input, e.g. `[["wq", "wk", "wv"], ["w1", "w3"]]`; None: the
    names of Llama and of Hugging Face's models. Compiled code then multiplies by one weight without a copy, where
    `options={"pack": ...}` packs the site, and for few tokens in a graph with fused collectives.

    Parameters stay the same objects, with their names, shapes, values, gradients and optimizers. Call it on every rank,
    before torch.compile and before CUDA graphs are captured, and again after the weights have moved (`.to()`, `deepcopy`,
    `load_state_dict(assign=True)`). Moved weights stay correct: every call looks at their addresses, and copies weights that
    are apart. The memory of a group is freed with its last weight.

    Default groups are left as they are where a weight cannot be moved; the log has the reason. OptionError if `groups` names
    linears that no module has together, or whose weights cannot be moved: weights of FSDP (give the root model, which tells),
    parts of other storages (but shards of a whole weight that no other parameter or buffer of the model uses), different inner
    sizes, dtypes or devices.
    """
    packed, storages = [], _count_storages(model)
    for siblings in [tuple(names) for names in groups] if groups is not None else SIBLINGS:
        members = [(path, module) for path, module in model.named_modules() if all(_has_linear(module, n) for n in siblings)]
        if groups is not None and (len(siblings) < 2 or not members):
            raise _refused(siblings, "no module has linears of these names", "names of two or more linears of one module")
        for path, module in members:
            parameters = [getattr(module, name).weight for name in siblings]
            weights = [_local(parameter) for parameter in parameters]
            why = _explain_fixed(parameters, storages) or ("FSDP manages them" if _is_managed(model, path, siblings) else "")
            if why and groups is not None:
                raise _refused(siblings, f"in module {path!r}: {why}", "contiguous weights, each in a storage of its own")
            if why:
                log.info("pack: %s of %s are left as they are: %s", ", ".join(siblings), path or "the model", why)
                continue
            if not are_adjacent(weights):
                _move(parameters)
            for parameter in parameters:
                setattr(parameter, MARK, True)
            packed.append(PackedGroup(path, siblings, sum(w.numel() * w.element_size() for w in weights)))
    return packed


def are_adjacent(weights: Sequence[Tensor]) -> bool:
    """Return whether contiguous matrices follow each other in memory."""
    end = weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return False
        end += weight.numel() * weight.element_size()
    return True


def _has_linear(module: nn.Module, name: str) -> bool:
    weight = getattr(module._modules.get(name), "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _local(weight: Tensor) -> Tensor:
    """Return the tensor that holds the data of this rank."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _count_storages(model: nn.Module) -> Counter[int]:
    """Return how many parameters and buffers of the model lie in each storage, by its address."""
    tensors = {id(t): _local(t) for t in (*model.parameters(), *model.buffers())}.values()
    counts: Counter[int] = Counter()
    for tensor in tensors:
        try:
            counts[tensor.untyped_storage().data_ptr()] += 1
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage
            continue
    return counts


def _explain_fixed(parameters: Sequence[Tensor], storages: Counter[int]) -> str:
    """Return why weights cannot be put into one storage, or "". `storages`: as `_count_storages` returns them."""
    weights = [_local(parameter) for parameter in parameters]
    first = weights[0]
    if first.device.type == "meta":
        return "they are on the meta device; load the weights first"
    if any(type(w) not in (Tensor, nn.Parameter) for w in weights):
        return f"they are of the types {', '.join(sorted({type(w).__name__ for w in weights}))}"
    if any((w.shape[1], w.dtype, w.device) != (first.shape[1], first.dtype, first.device) for w in weights):
        return "they differ in inner size, dtype or device"
    if len({id(w) for w in weights}) < len(weights):
        return "two of them are the same weight"
    if are_adjacent(weights):
        return ""
    if not all(w.is_contiguous() for w in weights):
        return "a weight is not contiguous"
    for parameter, weight in zip(parameters, weights, strict=True):
        is_whole = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        if not is_whole and not _is_view_of_whole(parameter, weight, storages):
            return "a weight is a part of another storage"
    return ""


def _is_view_of_whole(parameter: Tensor, weight: Tensor, storages: Counter[int]) -> bool:
    """Return whether a shard is a view of the whole weight, as transformers loads it, and the only one of the model.

    The padded shards of FSDP have storages of other sizes.
    """
    storage = weight.untyped_storage()
    size = parameter.numel() * parameter.element_size()
    return isinstance(parameter, DTensor) and storage.nbytes() == size and storages[storage.data_ptr()] == 1


def _is_managed(model: nn.Module, path: str, names: Sequence[str]) -> bool:
    """Return whether FSDP manages a linear of the module at `path`: it is FSDP's, or inside of a module that is."""
    linears = [f"{path}.{name}" if path else name for name in names]
    managed = [root for root, module in model.named_modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    return any(not root or linear == root or linear.startswith(f"{root}.") for root in managed for linear in linears)


def _move(parameters: Sequence[Tensor]) -> None:
    """Copy the weights into one block of memory, and let each parameter use its part.

    A part has a storage of its own, as Dynamo does not trace DTensors whose local tensors share one.
    """
    weights = [_local(parameter) for parameter in parameters]
    first = weights[0]
    joined = torch.empty((sum(w.shape[0] for w in weights), first.shape[1]), dtype=first.dtype, device=first.device)
    begin = 0
    for parameter, weight in zip(parameters, weights, strict=True):
        part = torch.from_dlpack(joined[begin : begin + weight.shape[0]])
        part.copy_(weight)
        if isinstance(parameter, DTensor):  # has the offset of its local tensor, and Dynamo does not trace it with another one
            mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
            parameter.data = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        weight.data = part
        begin += weight.shape[0]


def _refused(siblings: Sequence[str], got: str, expected: str) -> OptionError:
    return OptionError(
        what=f"the weights of {', '.join(siblings)} cannot be packed",
        where="ub_overlap.pack(model, groups)",
        got=got,
        expected=expected,
        fix="leave the group out of groups",
    )
