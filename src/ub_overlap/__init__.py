"""Hides tensor-parallel communication behind matmuls: `torch.compile(model, backend="ub_overlap")`.

The face of the package: every name is handed on lazily (PEP 562), so that importing it costs nothing, touches no device and
starts no process group. The work is done in `ub_overlap.compiler` (finds and decides) and `ub_overlap.runtime` (executes).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ub_overlap.compiler.backend import ub_overlap as backend
    from ub_overlap.compiler.reports.explain import explain
    from ub_overlap.compiler.reports.report import Report, reports
    from ub_overlap.runtime import errors
    from ub_overlap.runtime.errors import UbOverlapError
    from ub_overlap.runtime.fp8.amax_history import fp8_state
    from ub_overlap.runtime.functional import all_gather_matmul, check, initialize, matmul_all_reduce, matmul_reduce_scatter

__version__ = "0.1.0"

# name -> (module, attribute; "" for the module itself)
_HOME = {
    "backend": ("ub_overlap.compiler.backend", "ub_overlap"),
    "explain": ("ub_overlap.compiler.reports.explain", "explain"),
    "Report": ("ub_overlap.compiler.reports.report", "Report"),
    "reports": ("ub_overlap.compiler.reports.report", "reports"),
    "errors": ("ub_overlap.runtime.errors", ""),
    "UbOverlapError": ("ub_overlap.runtime.errors", "UbOverlapError"),
    "all_gather_matmul": ("ub_overlap.runtime.functional", "all_gather_matmul"),
    "matmul_reduce_scatter": ("ub_overlap.runtime.functional", "matmul_reduce_scatter"),
    "matmul_all_reduce": ("ub_overlap.runtime.functional", "matmul_all_reduce"),
    "initialize": ("ub_overlap.runtime.functional", "initialize"),
    "check": ("ub_overlap.runtime.functional", "check"),
    "fp8_state": ("ub_overlap.runtime.fp8.amax_history", "fp8_state"),
}

__all__ = [
    "Report",
    "UbOverlapError",
    "__version__",
    "all_gather_matmul",
    "backend",
    "check",
    "errors",
    "explain",
    "fp8_state",
    "initialize",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reports",
]


def __getattr__(name: str) -> Any:
    """Import the home of `name` at its first use. AttributeError for a name this package does not have."""
    if name not in _HOME:
        raise AttributeError(f"module 'ub_overlap' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    module, attribute = _HOME[name]
    value: Any = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
