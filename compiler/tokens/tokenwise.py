"""ub_overlap.tokenwise(layer): declare that the tokens of a layer are independent."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ub_overlap.runtime.errors import OptionError

from .choose_halves import choose_dim
from .in_halves import in_halves

Layer = TypeVar("Layer", bound=nn.Module)


def tokenwise(layer: Layer, arguments: int = 1) -> Layer:
    """Declare that the tokens of `layer` are independent, so that compiled code may compute them in two halves.

    Call it on the layers of experts, before torch.compile. `layer` is changed in place and returned; outside of graphs that
    backend="ub_overlap" compiles it computes as before. The option `split_tokens` selects when it is cut. `arguments`: how many
    of the first positional arguments hold tokens, as a router's choices and scores do; other arguments are for all tokens.

    What you declare of its forward:

    - The first argument is [..., width]: all dims but the last one count tokens. Further ones have the same dims in front.
    - A token's results depend on that token only, and on the parameters. No capacity limit, no norm over tokens.
    - Results are tensors with the tokens of the first argument in front, or tuples, lists or dicts of such.
    - What it adds to buffers may be added in two parts, as counts of tokens may. Other state that it stores is that of the
      second half.

    Weight gradients are sums of two parts, so they differ by rounding. OptionError for what is no module with a forward of
    its own, and for `arguments` below 1.
    """
    cls: Any = type(layer)
    is_scripted = isinstance(layer, torch.jit.ScriptModule)
    if is_scripted or not isinstance(layer, nn.Module) or cls.forward in _NO_FORWARDS:
        raise OptionError(
            what="ub_overlap.tokenwise takes a layer that is called",
            where="ub_overlap.tokenwise(layer)",
            got=cls.__name__,
            expected="a torch.nn.Module with a forward",
            fix="declare each layer of experts: for block in model.layers: ub_overlap.tokenwise(block.mlp)",
        )
    if not isinstance(arguments, int) or isinstance(arguments, bool) or arguments < 1:
        raise OptionError(
            what="bad number of arguments that hold tokens",
            where="ub_overlap.tokenwise(layer, arguments=...)",
            got=repr(arguments),
            expected="an integer of at least 1",
        )
    if not getattr(cls, "_ub_overlap_tokenwise", False):
        layer.__class__ = _subclass(cls)
    layer._ub_overlap_token_arguments = arguments  # type: ignore[assignment]
    return layer


_NO_FORWARDS = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


@functools.cache
def _subclass(cls: type[nn.Module]) -> Any:
    """Return a class that differs from `cls` in its forward. Copies of a layer keep it, unlike a forward of the instance."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            count: Any = self._ub_overlap_token_arguments
            layer, tokens, rest = self, args[:count], args[count:]  # noqa: F841  choose_dim reads `layer`, and `tokens`
            dim = choose_dim() if len(tokens) == count and all(isinstance(t, Tensor) for t in tokens) else -1
            if dim >= 0:
                return in_halves(lambda *half: cls.forward(self, *half, *rest, **kwargs), tokens, dim)
        return cls.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, _protocol: Any) -> Any:
        get_state = getattr(self, "__getstate__", None)  # of every object since Python 3.11
        return _restore, (cls,), get_state() if get_state else self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own = {"forward": forward, "__reduce_ex__": reduce, "_ub_overlap_tokenwise": True}
    return type(cls.__name__, (cls,), {**names, **own})


def _restore(cls: type[nn.Module]) -> nn.Module:
    """Return a layer of `cls` that is declared, for pickle and copy, which set its state."""
    made = _subclass(cls)
    return made.__new__(made)
