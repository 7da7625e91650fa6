"""Weight gradients that are computed after the input gradients of a backward, on request.

A compiled backward comes in two parts (`TwoPartBackward`). Without a collector both run. Within `collect` the first runs:

    first part     tangents, saved tensors -> gradients of inputs, and the values that the second part reads
    collector      keeps those values. autograd gets a stand-in for each deferred gradient
    hook           of each parameter's AccumulateGrad: takes the stand-in away, so that nothing is accumulated
    run()          second part -> the gradients, which autograd passes to the same AccumulateGrad

Stand-ins have the size of the gradient and the memory of one element. Hooks behind AccumulateGrad run twice, the first time
without a gradient: DistributedDataParallel ignores that, and those of register_post_accumulate_grad_hook are refused.
"""

from __future__ import annotations

import functools
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
    """A deferred gradient of a parameter. `stand_in`: what autograd passed to its AccumulateGrad."""

    parameter: Tensor
    stand_in: Tensor


class _Call:
    """One run of a backward whose second part is still to run."""

    def __init__(self, second: BoxedFunction, values: list[Any], outputs: Sequence[DeferredOutput]) -> None:
        self.second, self.values = second, values
        self.claims: list[_Claim | None] = [None] * len(outputs)
        self.stand_ins = [torch.empty((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]

    def parameters(self) -> list[Tensor]:
        assert None not in self.claims, "collect() has refused gradients without a parameter"
        return [claim.parameter for claim in self.claims if claim is not None]

    def run(self) -> None:
        with torch.no_grad():
            gradients = list(self.second(self.values))
            for i, claim in enumerate(self.claims):
                assert claim is not None
                gradients[i] = _dressed(gradients[i], claim.stand_in)
        pass_to(self.parameters(), gradients)


class _Gradients(torch.autograd.Function):
    """Has the given gradients, whatever that of its output is. None: no gradient, but hooks run."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()  # a gradient without other references becomes the parameter's, without a copy
        return None, *gradients


def join(parameters: Sequence[Tensor]) -> Tensor:
    """Return a tensor from which autograd's graph leads to the parameters."""
    with torch.enable_grad():
        return _Gradients.apply([None] * len(parameters), *parameters)  # type: ignore[no-any-return]


def pass_to(parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Pass gradients to parameters as a backward does, with all hooks. Empty the list."""
    if parameters:
        with torch.enable_grad():
            out = _Gradients.apply(gradients, *parameters)
        out.backward()


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

    def claim(self, parameter: Tensor, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is a stand-in, which is then that of `parameter`."""
        if not self._open or gradient is None:
            return False
        inner = _inner(gradient)
        found = self._open.pop(inner.data_ptr(), None) if type(inner) is Tensor else None
        if found is None:
            return False
        call, i = found
        call.claims[i] = _Claim(parameter, gradient)
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

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients are deferred."""
        return [p for call in self._calls for p in call.parameters()]

    def reads_freed_memory(self) -> bool:
        """Return whether a second part reads a tensor without memory, as fully_shard leaves parameters when it reshards."""
        tensors = (_inner(v) for call in self._calls for v in call.values if isinstance(v, Tensor))
        return any(t.numel() > 0 and t.untyped_storage().size() == 0 for t in tensors)

    def run(self) -> None:
        """Compute the gradients and accumulate them. Once."""
        calls, self._calls = self._calls, []
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
        """Add the hooks of parameters that have none. OptionError for one that has a hook of torch behind AccumulateGrad."""
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
                node.register_prehook(functools.partial(_take, parameter))
                self._nodes[parameter] = node


def _take(parameter: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
    return (None,) if _current is not None and _current.claim(parameter, gradients[0]) else None


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
