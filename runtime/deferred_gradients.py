"""Weight gradients that are computed after the input gradients of a backward, on request.

A compiled backward comes in two parts (`TwoPartBackward`). Without a collector both run. Within `collect` the first runs:

    first part     tangents, saved tensors -> gradients of inputs, and the values that the second part reads
    collector      keeps those values. autograd gets a stand-in for each deferred gradient
    hook           of each parameter's AccumulateGrad: takes the stand-in away, so that nothing is accumulated
    run()          second part -> the gradients, which the same AccumulateGrad accumulates

Stand-ins have the size of the gradient and the memory of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ub_overlap import _torch_compat

from . import errors

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph. It may empty its list of inputs."""


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """A gradient that the second part computes. `position`: among the outputs of the whole backward."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class _Claim:
    """A deferred gradient of a parameter: `accumulate` is its AccumulateGrad, `stand_in` what autograd passed to it."""

    accumulate: Any
    stand_in: Tensor


class _Call:
    """One run of a backward whose second part is still to run."""

    def __init__(self, second: BoxedFunction, values: list[Any], outputs: Sequence[DeferredOutput]) -> None:
        self.second, self.values = second, values
        self.claims: list[_Claim | None] = [None] * len(outputs)
        self.stand_ins = [torch.empty(1, dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]

    def run(self) -> None:
        gradients = self.second(self.values)
        for claim, gradient in zip(self.claims, gradients, strict=True):
            assert claim is not None, "collect() has refused gradients without a parameter"
            claim.accumulate(_dressed(gradient, claim.stand_in))


def _parts_of(tensor: Any) -> tuple[dict[str, Any], list[str]]:
    """Return all parts of a subclass by name (a DTensor: its local tensor, its mesh), and the names of tensors."""
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return parts, [name for name, part in parts.items() if isinstance(part, Tensor)]


def _inner(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or of another subclass with one tensor."""
    while _torch_compat.is_wrapper_subclass(tensor):
        parts, names = _parts_of(tensor)
        if len(names) != 1:
            break
        tensor = parts[names[0]]
    return tensor


def _dressed(gradient: Tensor, like: Any) -> Tensor:
    """Return `gradient` as the subclass that `like` is."""
    if not _torch_compat.is_wrapper_subclass(like):
        return gradient
    parts, (name,) = _parts_of(like)
    parts[name] = _dressed(gradient, parts[name])
    return type(like).__tensor_unflatten__(parts, like.__tensor_flatten__()[1], like.size(), like.stride())


class DeferredGradients:
    """The deferred gradients of one backward."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._open: dict[int, tuple[_Call, int]] = {}  # by the address of a stand-in

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, second: BoxedFunction, values: list[Any], outputs: Sequence[DeferredOutput]) -> list[Tensor]:
        """Defer `second(values)`. Return a stand-in for each of its outputs."""
        call = _Call(second, values, outputs)
        self._calls.append(call)
        self._open |= {stand_in.data_ptr(): (call, i) for i, stand_in in enumerate(call.stand_ins)}
        return call.stand_ins

    def claim(self, accumulate: Any, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is a stand-in, which is then that of the parameter with this AccumulateGrad."""
        if not self._open or gradient is None:
            return False
        inner = _inner(gradient)
        found = self._open.pop(inner.data_ptr(), None) if type(inner) is Tensor else None
        if found is None:
            return False
        call, i = found
        call.claims[i] = _Claim(accumulate, gradient)
        return True

    def check(self) -> None:
        """Raise OptionError unless each stand-in has reached its parameter."""
        if self._open:
            raise errors.OptionError(
                "a weight gradient cannot be deferred: something between the compiled graph and the parameter reads it",
                where="backward within ub_overlap.pipeline.Stage",
                got=f"{len(self._open)} gradients that reached no parameter, or a sum with another gradient",
                expected="parameters that one compiled graph reads once, without hooks on their gradients",
                fix="compile without defer_weight_gradients, or without graph breaks between uses of a shared weight",
            )

    def run(self) -> None:
        """Compute the gradients and accumulate them. Once."""
        calls, self._calls = self._calls, []
        with torch.no_grad():
            for call in calls:
                call.run()


_current: DeferredGradients | None = None  # not of a thread: autograd runs CUDA graphs in threads of its own


@contextmanager
def collect(hooks: ParameterHooks, parameters: Iterable[Tensor]) -> Iterator[DeferredGradients]:
    """Collect the deferred gradients of one backward, which runs within. One at a time in a process."""
    global _current
    assert _current is None, "a backward within a backward"
    hooks.install(parameters)
    collected = DeferredGradients()
    _current = collected
    try:
        yield collected
    finally:
        _current = None
    collected.check()


class ParameterHooks:
    """Hooks before AccumulateGrad of parameters, which take stand-ins away. Without a collector they do nothing."""

    def __init__(self) -> None:
        self._nodes: dict[Tensor, Any] = {}  # keeps AccumulateGrad, which a parameter holds weakly

    def install(self, parameters: Iterable[Tensor]) -> None:
        """Add the hooks of parameters that have none. OptionError for one that has a hook behind AccumulateGrad."""
        for parameter in parameters:
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise errors.OptionError(
                    "a weight gradient cannot be deferred: torch calls the parameter's hook before it",
                    where="backward within ub_overlap.pipeline.Stage",
                    got="a parameter with register_post_accumulate_grad_hook",
                    fix="remove the hook, or use PipelineStage",
                )
            if parameter.requires_grad and parameter not in self._nodes:
                node = get_gradient_edge(parameter).node
                node.register_prehook(lambda gradients, node=node: _take(node, gradients))
                self._nodes[parameter] = node


def _take(node: Any, gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
    return (None,) if _current is not None and _current.claim(node, gradients[0]) else None


class TwoPartBackward:
    """A compiled backward whose weight gradients can be deferred. A boxed function.

    `first`: all inputs -> `results` outputs of the whole backward in order, without the deferred ones, then values.
    `second`: inputs at `kept`, then those values -> the deferred outputs.
    """

    def __init__(
        self,
        first: BoxedFunction,
        second: BoxedFunction,
        kept: Sequence[int],
        results: int,
        deferred: Sequence[DeferredOutput],
    ) -> None:
        self.first, self.second, self.kept, self.results, self.deferred = first, second, kept, results, deferred
        self._boxed_call = True  # of the instance: Dynamo's wrappers copy instance attributes

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = [inputs[i] for i in self.kept]
        outputs = list(self.first(inputs))
        values += outputs[self.results :]
        del outputs[self.results :]
        gradients = self.second(values) if _current is None else _current.add(self.second, values, self.deferred)
        for output, gradient in zip(self.deferred, gradients, strict=True):  # positions ascend
            outputs.insert(output.position, gradient)
        return outputs
