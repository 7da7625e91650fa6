"""Plans of graphs whose code comes from torch's compile cache, where the passes do not run.

    first process    RewritePass records a plan   -> <cache>/compiled/<key>.json, {phase: digest}
    later process    no pass ran for this graph   -> the plans under its key are in reports

The key is of what the backend gets from Dynamo, and of what the passes depend on. Ops in cached code name their plan too, but
code in which nothing is overlapped has no op of ours.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ub_overlap.runtime import plan_store, stored_file
from ub_overlap.runtime.errors import StoredFileError

from ..plan.phase import PHASES
from ..plan.plan import Plan
from .history import HISTORY
from .summary import log_first_plan

log = logging.getLogger(__name__)

VERSION = 1


def key_of(gm: GraphModule, example_inputs: Sequence[Any], passes: Any) -> str:
    """Return the key of a graph of Dynamo; "" where nothing is cached. `passes`: the cache key of our pass, None without."""
    if passes is None:
        return ""
    code = [module.code for module in gm.modules() if isinstance(module, GraphModule)]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    text = repr((passes, code, modes, [_describe(value) for value in example_inputs]))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, int | float | torch.SymInt) else type(value).__name__
    facts = [type(value).__name__, tuple(value.shape), value.dtype, value.device.type, value.requires_grad]
    if value.layout == torch.strided:
        facts.append(value.stride())
    return str([*facts, getattr(value, "placements", None)])


def path_of(key: str) -> Path:
    """Return the file of a key. FileNotFoundError without a folder for files."""
    return plan_store.directory().parent / "compiled" / f"{key}.json"


def note(key: str, plan: Plan) -> None:
    """Store that the graph of `key` has become `plan`. Never raise: only reports read it."""
    if not key:
        return
    try:
        text = json.dumps({"version": VERSION, "plans": {**_stored(key), plan.phase: plan.digest}})
        plan_store.bound(stored_file.write(path_of(key), text).parent)
    except OSError as error:
        plan_store.log_unsaved("graph", plan.digest, "runs with a warm compile cache do not report what is left alone", error)


def remember_cached(key: str, overlap: str) -> None:
    """Put the stored plans of a graph whose passes did not run into the history of this process. `overlap`: the option.

    Never raise: a compilation does not end because its report cannot be read.
    """
    try:
        plans = HISTORY.find_all(_stored(key).values()) if key else []
    except ImportError as error:  # msgspec, which an installation without dependencies lacks
        log.warning("reports lack a graph out of torch's compile cache: %s", error)
        return
    for plan in plans:
        HISTORY.remember(plan)
        log_first_plan(plan, overlap)


def _stored(key: str) -> dict[str, str]:
    """Return {phase: digest}; {} where nothing is stored, or the file is damaged."""
    try:
        content = stored_file.read_json(path_of(key)) if path_of(key).is_file() else {}
        plans = content["plans"] if content.get("version") == VERSION else {}
        return {phase: str(plans[phase]) for phase in PHASES if plan_store.is_digest(str(plans.get(phase, "")))}
    except (OSError, StoredFileError, KeyError, AttributeError, TypeError) as error:
        log.debug("no plans of the cached graph %s: %s", key, error)
        return {}
