"""Inductor's graph of the parallel block, with collectives that take no time: the variant "nocomm".

The variant "compute" has other graphs than the parallel block: its gathers ignore their input, and the gradients of its
scatters ignore theirs. So norms in front of gathers are dead code, and AOTAutograd moves most of the backward into the forward
graph, where Inductor fuses the two. This variant differs from "inductor" by its collectives alone:

    all_gather, reduce_scatter    an op without a kernel returns a tensor of the right sizes
    all_reduce                    its input
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from ub_overlap import _torch_compat as compat

_results: dict[tuple[Any, ...], Tensor] = {}


@torch.library.custom_op("ub_overlap_benchmarks::stand_in", mutates_args=())
def stand_in(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a tensor of these sizes at once, the same memory at every call. Its values have no meaning.

    Each call returns a tensor object of its own. Inductor may compute a graph's output in place of it, and autograd then
    attaches the graph to the object. A cached object would keep that graph alive, with gradient accumulators of the default
    stream, which no capture on another stream may wait for."""
    key = (tuple(sizes), x.dtype, x.device)
    if key not in _results:
        _results[key] = torch.randn(sizes, device=x.device).to(x.dtype)
    return _results[key].detach()


@stand_in.register_fake
def _(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(sizes)


def remove_collectives(graph: Graph) -> int:
    """Replace the collectives of a graph in place, and return their number.

    x -> all_gather_into_tensor -> wait_tensor -> users        x -> stand_in -> users
    x -> all_reduce -> wait_tensor -> users                    x -> users
    """
    ops = torch.ops._c10d_functional
    sized = {ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default}
    count = 0
    for node in list(graph.nodes):
        if node.target in sized:
            with graph.inserting_before(node):
                new = graph.call_function(
                    torch.ops.ub_overlap_benchmarks.stand_in.default, (node.args[0], list(node.meta["val"].shape))
                )
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
        elif node.target in (ops.all_reduce.default, ops.wait_tensor.default):
            node.replace_all_uses_with(node.args[0])
        else:
            continue
        count += node.target is not ops.wait_tensor.default
        graph.erase_node(node)
    graph.lint()
    return count


def removal_pass() -> Any:
    """Return `remove_collectives` as a pass for Inductor's option post_grad_custom_pre_pass."""
    base: Any = compat.custom_graph_pass()

    class Removal(base):
        def __call__(self, graph: Graph) -> None:
            remove_collectives(graph)

        def uuid(self) -> str:
            return compat.hash_of_files([__file__])

    return Removal()
