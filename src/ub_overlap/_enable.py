"""The passes for programs that cannot name a backend: `ub_overlap.enable()` serves torch.compile's "inductor" in this process.

Trainers have closed lists of backends (accelerate, HF Trainer and what is built on them). Their graphs reach Inductor through
the object that torch.compile makes for backend="inductor". Its call is replaced here, so a graph is compiled as by
backend="ub_overlap" with the options of `enable`, and with the program's own options of Inductor, which stay as they are:
neither Inductor's configuration nor the object holds anything of ours.

    graph of Dynamo -> torch's object for "inductor" -> is there a group of several ranks? -> ub_overlap/compiler/backend.py
                                                                                     no    -> Inductor, as without us

torch may call `enable_by_variable` at the end of its own import (src/_ub_overlap_autoload.py), which any other file of this
package may have begun. So this file imports torch in functions only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import errors

VARIABLE = "UB_OVERLAP_ENABLE"
log = logging.getLogger("ub_overlap")
_undo: list[Callable[[], None]] = []  # what `disable` calls
_options: dict[str, Any] = {}


def enable(options: Mapping[str, Any] | None = None, *, fsdp: bool = False) -> None:
    """Compile what torch.compile(backend="inductor") gets from now on with overlap. `disable()` undoes it.

    `options`: as of backend="ub_overlap"; with inner="aot_eager" the program's options of Inductor have no effect. `fsdp`:
    serve the modules of fully_shard too, as `ub_overlap.fsdp.install` does, each model when it first runs. Call it on all
    ranks, before the first step: compiled graphs and models that have run stay as they are. A second call replaces the first. A
    process without a group of several ranks is not changed. OptionError for invalid options.
    """
    from ub_overlap.compiler.options import parse

    options = dict(options or {})
    parse(options, compat.inductor_option_names())
    _enable(options, fsdp)


def disable() -> None:
    """Compile with plain Inductor again. Compiled graphs, and models that have run, stay as they are. Idempotent."""
    while _undo:
        _undo.pop()()


def enable_by_variable(text: str) -> None:
    """Enable with the value of UB_OVERLAP_ENABLE: 1, or the arguments of `enable` as a JSON object or a file with one.

    torch calls this when it is imported, so the options themselves are validated by the first compilation.
    """
    arguments = {} if text.lower() in ("1", "true", "yes", "on") else _read_arguments(text)
    _enable(arguments, arguments.pop("fsdp", False))


def _read_arguments(text: str) -> dict[str, Any]:
    """Return a JSON object of options, in which "fsdp" is `enable`'s other argument."""
    try:
        found = json.loads(text if text.startswith("{") else Path(text).read_text())
        if isinstance(found, dict) and isinstance(found.get("fsdp", False), bool):
            return found
        got = json.dumps(found)
    except (OSError, ValueError) as error:
        got = str(error)
    raise errors.OptionError(
        what=f"{VARIABLE} has no options",
        where=f"{VARIABLE}={text}",
        got=got,
        expected='1, 0, a JSON object such as {"overlap": "force", "fsdp": true}, or the path of a file with one',
    )


def _enable(options: dict[str, Any], fsdp: bool) -> None:
    global _options
    hooks = [_replace_call]
    if fsdp:
        from ub_overlap.runtime.data_parallel.fsdp import install_at_first_forward

        hooks.append(install_at_first_forward)
    disable()
    _options = options
    _undo.extend(hook() for hook in hooks)


def _replace_call() -> Callable[[], None]:
    """Let ours be called for torch's object. Return what undoes it."""
    backend_type = compat.InductorBackend
    plain = backend_type.__call__

    def call(self: Any, model: Any, inputs: Any, *, config_patches: dict[str, Any] | None = None, **more: Any) -> Any:
        # Of a subclass, AOTInductor's, programs run elsewhere. `more`: of a torch that we do not know.
        if type(self) is not backend_type or more or not _has_peers():
            return plain(self, model, inputs, **({"config_patches": config_patches} if config_patches else {}), **more)
        from ub_overlap.compiler.backend import ub_overlap

        log.info("backend 'inductor' overlaps: %s", _options or "default options")
        options = {**options_of(self), **(config_patches or {})}
        return ub_overlap(model, inputs, options=options, region=getattr(self, "name", None))

    def options_of(backend: Any) -> dict[str, Any]:
        return {**_options, **backend.config}

    def undo() -> None:
        backend_type.__call__ = plain

    call.options_of = options_of  # type: ignore[attr-defined]  # `explain` compiles such a model again with these
    backend_type.__call__ = call
    return undo


def _has_peers() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
