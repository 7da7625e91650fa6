"""Workarounds for bugs of Inductor in some torch releases. They also affect graphs of other backends, which stay correct."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ub_overlap import _torch_compat as compat


@functools.cache
def apply_bug_patches() -> None:
    """Apply all, once in a process."""
    _mend_fused_reads()
    _mend_stored_reductions()
    _mend_any_arguments()
    _mend_tiling()


def _mend_fused_reads() -> None:
    """Patch a bug of Inductor on the CPU: fused nodes lose their dependency on in-place collectives.

    When fusion reorders a node's loops, torch 2.11 to 2.13 drop the renames of mutated buffers. The node may then run before
    the collective that writes its input: a float8 cast would be scaled by the amax of one rank.
    """
    node = compat.__getattr__("inductor_node")
    recompute = node.recompute_size_and_body

    def mended(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    node.recompute_size_and_body = mended


def _mend_stored_reductions() -> None:
    """Patch a bug of Inductor on the CPU: code that stores one vectorized sum to two buffers of 16 bits does not compile.

    torch 2.11 to 2.15 declare the converted sum once for each store, under one name. Gradients of two biases of one value, such
    as `F.linear(x, w, b) + c`, are such sums.
    """
    kernel, line = compat.__getattr__("cpp_vector_kernel"), compat.__getattr__("deferred_line")
    store = kernel.store_reduction

    def mended(self: Any, name: str, index: Any, value: Any) -> None:
        # Buffers that are removed later take their lines with them: hence lines of `name`.
        self.reduction_suffix.writeline(line(name, "{"))
        store(self, name, index, value)
        self.reduction_suffix.writeline(line(name, "}"))

    kernel.store_reduction = mended


def _mend_any_arguments() -> None:
    """Patch a bug of Inductor's C++ wrapper: torch 2.13 has no code for texts in arguments of type Any.

    The group names of functional collectives are such arguments. A collective that is not overlapped has one.
    """
    wrapper = compat.__getattr__("cpp_wrapper")
    generate = wrapper.generate_py_arg

    def mended(self: Any, args: str, index: int, value: Any, arg_type: Any) -> Any:
        is_text = isinstance(arg_type, torch.AnyType) and isinstance(value, str)
        return generate(self, args, index, value, torch.StringType.get() if is_text else arg_type)

    wrapper.generate_py_arg = mended


def _mend_tiling() -> None:
    """Patch a bug of Inductor on GPUs: tiles ignore reads of a buffer that a collective has written in place.

    torch 2.11 to 2.15 look reads up by the name of the buffer after the mutation, but loops have its first name. A transposed
    copy of a gathered float8 tensor then has tiles of one dim, whose neighboring threads read neighboring rows.
    """
    tiling = compat.__getattr__("inductor_tiling")
    tiling.extract_normalized_read_writes = with_real_names(tiling.extract_normalized_read_writes)


class _WithRealNames:
    """A scheduler node whose reads have the first names of their buffers. Nodes may be frozen: this is a view of one."""

    def __init__(self, node: Any, real_names: dict[str, str]) -> None:
        self._node, self.read_writes = node, node.read_writes.rename(real_names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def with_real_names(extract: Callable[..., Any]) -> Callable[..., Any]:
    """Return `extract`, a function of a scheduler node, which then finds the node's reads under the first names of buffers."""
    virtualized = compat.__getattr__("inductor_virtualized")

    @functools.wraps(extract)
    def mended(node: Any, *args: Any, **kwargs: Any) -> Any:
        return extract(_WithRealNames(node, virtualized.graph.scheduler.mutation_real_name), *args, **kwargs)

    return mended
