"""What every entry to the passes does first: parse the options, and load what rewritten graphs need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops
from ub_overlap.runtime.session import plan_graphs

from .diff.compare_ranks import explain_difference
from .options import Options, parse


def parse_and_load(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Return (our options, Inductor's) after loading what compiled graphs need. OptionError for invalid options."""
    ours, theirs = parse(options, compat.inductor_option_names())
    ops.load()
    plan_graphs.install(explain_difference)
    return ours, theirs
