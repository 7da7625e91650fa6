"""Compile a model once more in a process that compiled it before, and leave the compiled code of the process alone.

Dynamo keeps compiled code with the model's code objects, for all compilations of them. A second compilation with an equal
backend finds the first one's code and runs no pass. So an isolated compilation has a backend of its own:

    lookup       a backend that equals no other one, so that neither finds the other's code
    limits       its entries are not counted against the recompilation limits of the program
    shapes       the sizes that Dynamo saw, which decide what becomes dynamic, are copied and put back
    at the end   its entries are invalidated, which frees their graphs
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ub_overlap import _torch_compat as compat

from ..backend import ub_overlap

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class CompiledPart:
    """A model, or a submodule of it, that one torch.compile covers: what is compiled, and with which arguments."""

    target: Callable[..., Any]
    install: Callable[[Callable[..., Any]], contextlib.AbstractContextManager[Any]] | None = None
    """A context in which the model calls a given function for this part. None for the model itself."""
    options: Mapping[str, Any] | None = None
    """The options of this backend, or of ub_overlap.enable. None if another backend compiled it, or none."""
    dynamic: bool | None = None
    fullgraph: bool = False


def compiled_parts(model: Callable[..., Any]) -> list[CompiledPart]:
    """Return the parts of `model` that are compiled.

    It is the model, if it is compiled. Else they are its outermost submodules that this backend compiled, else the model.
    """
    if (part := _part_of(model)) is not None:
        return [replace(part, install=None)]
    parts: list[CompiledPart] = []
    if isinstance(model, nn.Module):
        todo = list(model.children())
        while todo:
            child = todo.pop(0)
            part = _part_of(child)
            if part is None:
                todo = [*child.children(), *todo]
            elif part.options is not None and all(part.target != p.target for p in parts):
                parts.append(part)
    return parts or [CompiledPart(model)]


def _part_of(model: Any) -> CompiledPart | None:
    """Return what torch.compile(model), model.compile() or a decorator compiled, or None."""
    if isinstance(model, nn.Module) and (original := getattr(model, "_orig_mod", None)) is not None:
        return _part(original, model.dynamo_ctx, lambda compiled: _replaced(model, "forward", compiled.forward))
    if isinstance(model, nn.Module) and (in_place := getattr(model, "_compiled_call_impl", None)) is not None:
        return _part(
            model._call_impl, _context_of(in_place), lambda compiled: _replaced(model, "_compiled_call_impl", compiled)
        )
    if not isinstance(model, nn.Module) and (original := getattr(model, "_torchdynamo_orig_callable", None)) is not None:
        return _part(original, _context_of(model), None)
    return None


def _context_of(wrapper: Callable[..., Any]) -> Any:
    """The object of Dynamo behind a compiled function, None if this torch has none there."""
    with contextlib.suppress(TypeError):
        return inspect.getclosurevars(wrapper).nonlocals.get("self")
    return None


def _part(target: Callable[..., Any], context: Any, install: Any) -> CompiledPart:
    options = None
    backend = compat.innermost_backend(context.callback) if callable(getattr(context, "callback", None)) else None
    if getattr(backend, "compiler_fn", None) is ub_overlap:
        arguments = getattr(backend, "kwargs", {})
        options = {**({"mode": arguments["mode"]} if "mode" in arguments else {}), **arguments.get("options", {})}
    elif enabled := getattr(type(backend).__call__, "options_of", None):
        options = enabled(backend)  # torch's own backend while ub_overlap.enable serves it
    return CompiledPart(target, install, options, getattr(backend, "dynamic", None), bool(getattr(context, "fullgraph", False)))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class IsolatedCompiler:
    """Compiles parts, each call again. It is used inside of `isolated_compiler`."""

    def __init__(self) -> None:
        self.backends: list[Callable[..., Any]] = []

    def compile(self, part: CompiledPart, options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the compiled part. Its code is valid until the context ends."""

        @functools.wraps(ub_overlap)
        def backend(*args: Any, **kwargs: Any) -> Any:
            return ub_overlap(*args, **kwargs)

        self.backends.append(backend)
        arguments: dict[str, Any] = {"dynamic": part.dynamic, "fullgraph": part.fullgraph, "options": dict(options) or None}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13: limits of its own
            arguments["isolate_recompiles"] = True
        return torch.compile(part.target, backend=backend, **arguments)

    @contextlib.contextmanager
    def installed(self, model: Callable[..., Any], parts: Sequence[CompiledPart]) -> Iterator[Callable[..., Any]]:
        """Yield a function that runs `model` with `parts` compiled again, each with its options."""
        with contextlib.ExitStack() as stack:
            function = model
            for part in parts:
                compiled = self.compile(part, part.options or {})
                if part.install is None:
                    function = compiled
                else:
                    stack.enter_context(part.install(compiled))
            yield function


@contextlib.contextmanager
def isolated_compiler() -> Iterator[IsolatedCompiler]:
    """Yield a compiler whose code is apart from the process's. Compile caches on disk are bypassed."""
    compiler = IsolatedCompiler()
    codes: dict[Any, None] = {}
    hook = compat.on_bytecode(lambda code, _: codes.setdefault(code))
    seen_shapes = _shapes_seen()
    limits = {"recompile_limit": _UNLIMITED, "accumulated_recompile_limit": _UNLIMITED}
    local = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False, "caching_precompile": False}
    known = {name: value for name, value in (limits | local).items() if hasattr(compat.dynamo_config, name)}
    try:
        with compat.dynamo_config.patch(**known), compat.caches_off():
            yield compiler
    finally:
        hook.remove()
        compat.dynamo_pgo._CODE_STATE = seen_shapes
        for code in codes:
            _drop_entries(code, compiler.backends)


def _shapes_seen() -> Any:
    """Replace Dynamo's record of sizes by a copy and return the original."""
    seen = compat.dynamo_pgo._CODE_STATE
    compat.dynamo_pgo._CODE_STATE = copy.deepcopy(seen)
    return seen


def _drop_entries(code: Any, backends: list[Callable[..., Any]]) -> None:
    """Invalidate the entries of a code object that `backends` compiled."""
    for entry in compat.dynamo_entries(code):
        owner = getattr(entry.guard_manager, "extra_state", None)
        if owner is not None and any(getattr(entry.backend, "compiler_fn", None) is b for b in backends):
            guards = compat.DeletedGuards("it belonged to ub_overlap.explain")
            # An entry counts against the limits of the frames that have its objects. No frame has this one.
            guards.id_matched_objs = {"": weakref.ref(IsolatedCompiler)}
            owner.invalidate(entry, guards)
