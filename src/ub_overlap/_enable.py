"""The passes for programs that cannot name a backend: `ub_overlap.enable()` serves torch.compile's "inductor" in this process.

Trainers have closed lists of backends (accelerate, HF Trainer and what is built on them). Their graphs reach Inductor through
the object that torch.compile makes for backend="inductor". Its call is replaced here, so a graph is compiled as by
backend="ub_overlap" with the options of `enable`, and with the program's own options of Inductor, which stay as they are:
neither Inductor's configuration nor the object holds anything of ours.

    graph of Dynamo -> torch's object for "inductor" -> is there a group of several ranks? -> ub_overlap/compiler/backend.py
                                                                                     no    -> Inductor, as without us

torch calls `autoload` at the end of its own import (entry point "torch.backends"), which any other file of this package may
have begun. So this file imports torch in functions only.
"""

from __future__ import annotations

import json
import logging
import os
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

    `options`: as of backend="ub_overlap". `fsdp`: serve the modules of fully_shard too, as `ub_overlap.fsdp.install` does, each
    model when it first runs. Call it on all ranks, before the first step: compiled graphs and models that have run stay as they
    are. A second call replaces the first. A process without a group of several ranks is not changed. OptionError for invalid
    options.
    """
    from ub_overlap.compiler.options import parse

    options = dict(options or {})
    parse(options, compat.inductor_option_names())
    _enable(options, fsdp)


def disable() -> None:
    """Compile with plain Inductor again. Compiled graphs, and models that have run, stay as they are. Idempotent."""
    while _undo:
        _undo.pop()()


def autoload() -> None:
    """Enable with the value of UB_OVERLAP_ENABLE: 1, or the arguments of `enable` as JSON. "", 0: not.

    The options are validated by the first compilation.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return
    options = {} if text == "1" else _read_options(text)
    fsdp = options.pop("fsdp", False)
    _enable(options, bool(fsdp))


def _read_options(text: str) -> dict[str, Any]:
    """Return the options of a JSON object, or of a file with one; the name "fsdp" is that of `enable`'s argument."""
    try:
        found = json.loads(text if text.startswith("{") else Path(text).read_text())
        if isinstance(found, dict):
            return found
        got = f"a JSON {type(found).__name__}"
    except (OSError, ValueError) as error:
        got = str(error)
    raise errors.OptionError(
        what=f"{VARIABLE} has no options",
        where=f"{VARIABLE}={text}",
        got=got,
        expected='1, 0, a JSON object such as {"overlap": "force"}, or the path of a file with one',
    )


def _enable(options: dict[str, Any], fsdp: bool) -> None:
    global _options
    disable()
    _options = options
    _undo.append(_replace_call())
    if fsdp:
        from ub_overlap.runtime.data_parallel.fsdp import install_at_first_forward

        _undo.append(install_at_first_forward())
    said = "".join(f" {name}={value!r}" for name, value in options.items())
    log.info("torch.compile's backend 'inductor'%s overlaps:%s", " and fully_shard" if fsdp else "", said or " default options")


def _replace_call() -> Callable[[], None]:
    """Let ours be called for torch's object. Return what undoes it."""
    backend_type = compat.InductorBackend
    plain = backend_type.__call__

    def call(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        if not (type(self) is backend_type and _has_peers()):  # of a subclass, AOTInductor's, programs run elsewhere
            return plain(self, model, inputs, **more)
        from ub_overlap.compiler.backend import ub_overlap

        theirs = {**self.config, **(more.get("config_patches") or {})}
        return ub_overlap(model, inputs, options={**_options, **theirs})

    def undo() -> None:
        backend_type.__call__ = plain

    backend_type.__call__ = call
    return undo


def _has_peers() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
