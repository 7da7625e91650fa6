"""Hides the communication of parallel models behind their compute: `torch.compile(model, backend="ub_overlap")`.

The public API. Names are imported at their first use (PEP 562), so importing the package costs nothing, touches no device and
starts no process group. `ub_overlap.compiler` decides and rewrites, `ub_overlap.runtime` executes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ub_overlap._versions import VERSION as __version__
from ub_overlap.runtime.session import inherited_groups as _inherited_groups  # noqa: F401  (watches forks)

if TYPE_CHECKING:
    from ub_overlap import ddp, fsdp, pipeline
    from ub_overlap._enable import disable, enable
    from ub_overlap.compiler.backend import passes
    from ub_overlap.compiler.backend import ub_overlap as backend
    from ub_overlap.compiler.ddp import DDPGraphs, optimize_ddp
    from ub_overlap.compiler.fp8_config import Fp8Config
    from ub_overlap.compiler.options import options
    from ub_overlap.compiler.plan.plan import Plan
    from ub_overlap.compiler.reports.explain import explain
    from ub_overlap.compiler.reports.report import Report, reports
    from ub_overlap.compiler.tokens.tokenwise import tokenwise
    from ub_overlap.compiler.traced.apply_passes import apply_passes
    from ub_overlap.runtime import errors
    from ub_overlap.runtime.errors import UbOverlapError
    from ub_overlap.runtime.fp8.amax_history import fp8_state
    from ub_overlap.runtime.functional import (
        CollectiveHandle,
        all_gather,
        all_gather_matmul,
        all_reduce,
        all_to_all,
        check_errors,
        initialize_group,
        matmul_all_reduce,
        matmul_reduce_scatter,
        reduce_scatter,
    )
    from ub_overlap.runtime.pack import PackedGroup, pack
    from ub_overlap.runtime.point_to_point.connect import initialize_point_to_point
    from ub_overlap.runtime.point_to_point.messages import irecv, isend, recv, send
    from ub_overlap.runtime.session.abort import abort
    from ub_overlap.runtime.session.flight import flight_record
    from ub_overlap.runtime.settings import Settings, configure
    from ub_overlap.runtime.settings import current as settings
    from ub_overlap.runtime.stats import SiteStats, site_stats

__all__ = [
    "CollectiveHandle",
    "DDPGraphs",
    "Fp8Config",
    "PackedGroup",
    "Plan",
    "Report",
    "Settings",
    "SiteStats",
    "UbOverlapError",
    "__version__",
    "abort",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "apply_passes",
    "backend",
    "check_errors",
    "configure",
    "ddp",
    "disable",
    "enable",
    "errors",
    "explain",
    "flight_record",
    "fp8_state",
    "fsdp",
    "initialize_group",
    "initialize_point_to_point",
    "irecv",
    "isend",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "optimize_ddp",
    "options",
    "pack",
    "passes",
    "pipeline",
    "recv",
    "reduce_scatter",
    "reports",
    "send",
    "settings",
    "site_stats",
    "tokenwise",
]

if not TYPE_CHECKING:
    # name -> (module, attribute; "" for the module itself)
    _HOME = {
        "CollectiveHandle": ("ub_overlap.runtime.functional", "CollectiveHandle"),
        "DDPGraphs": ("ub_overlap.compiler.ddp", "DDPGraphs"),
        "Fp8Config": ("ub_overlap.compiler.fp8_config", "Fp8Config"),
        "PackedGroup": ("ub_overlap.runtime.pack", "PackedGroup"),
        "Plan": ("ub_overlap.compiler.plan.plan", "Plan"),
        "Report": ("ub_overlap.compiler.reports.report", "Report"),
        "Settings": ("ub_overlap.runtime.settings", "Settings"),
        "SiteStats": ("ub_overlap.runtime.stats", "SiteStats"),
        "UbOverlapError": ("ub_overlap.runtime.errors", "UbOverlapError"),
        "abort": ("ub_overlap.runtime.session.abort", "abort"),
        "all_gather": ("ub_overlap.runtime.functional", "all_gather"),
        "all_gather_matmul": ("ub_overlap.runtime.functional", "all_gather_matmul"),
        "all_reduce": ("ub_overlap.runtime.functional", "all_reduce"),
        "all_to_all": ("ub_overlap.runtime.functional", "all_to_all"),
        "apply_passes": ("ub_overlap.compiler.traced.apply_passes", "apply_passes"),
        "backend": ("ub_overlap.compiler.backend", "ub_overlap"),
        "check_errors": ("ub_overlap.runtime.functional", "check_errors"),
        "configure": ("ub_overlap.runtime.settings", "configure"),
        "ddp": ("ub_overlap.ddp", ""),
        "disable": ("ub_overlap._enable", "disable"),
        "enable": ("ub_overlap._enable", "enable"),
        "errors": ("ub_overlap.runtime.errors", ""),
        "explain": ("ub_overlap.compiler.reports.explain", "explain"),
        "flight_record": ("ub_overlap.runtime.session.flight", "flight_record"),
        "fp8_state": ("ub_overlap.runtime.fp8.amax_history", "fp8_state"),
        "fsdp": ("ub_overlap.fsdp", ""),
        "initialize_group": ("ub_overlap.runtime.functional", "initialize_group"),
        "initialize_point_to_point": ("ub_overlap.runtime.point_to_point.connect", "initialize_point_to_point"),
        "irecv": ("ub_overlap.runtime.point_to_point.messages", "irecv"),
        "isend": ("ub_overlap.runtime.point_to_point.messages", "isend"),
        "matmul_all_reduce": ("ub_overlap.runtime.functional", "matmul_all_reduce"),
        "matmul_reduce_scatter": ("ub_overlap.runtime.functional", "matmul_reduce_scatter"),
        "optimize_ddp": ("ub_overlap.compiler.ddp", "optimize_ddp"),
        "options": ("ub_overlap.compiler.options", "options"),
        "pack": ("ub_overlap.runtime.pack", "pack"),
        "passes": ("ub_overlap.compiler.backend", "passes"),
        "pipeline": ("ub_overlap.pipeline", ""),
        "recv": ("ub_overlap.runtime.point_to_point.messages", "recv"),
        "reduce_scatter": ("ub_overlap.runtime.functional", "reduce_scatter"),
        "reports": ("ub_overlap.compiler.reports.report", "reports"),
        "send": ("ub_overlap.runtime.point_to_point.messages", "send"),
        "settings": ("ub_overlap.runtime.settings", "current"),
        "site_stats": ("ub_overlap.runtime.stats", "site_stats"),
        "tokenwise": ("ub_overlap.compiler.tokens.tokenwise", "tokenwise"),
    }

    def __getattr__(name):
        """Import the home of `name`. AttributeError for a name that is not public."""
        import importlib

        if name not in _HOME:
            raise AttributeError(f"module 'ub_overlap' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
        module, attribute = _HOME[name]
        value = importlib.import_module(module)
        if attribute:
            value = getattr(value, attribute)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
