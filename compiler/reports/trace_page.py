"""The page of a plan next to torch's trace, and the link to it that tlparse shows: it takes no page among its artifacts."""

from __future__ import annotations

import os
from pathlib import Path

from ub_overlap import _torch_compat as compat

from ..plan.plan import Plan


def trace_page(plan: Plan) -> None:
    """Write the page of a plan to the folder of TORCH_TRACE, and a link to it to the trace. Nothing where there is none."""
    folder = os.environ.get("TORCH_TRACE")
    if not folder:
        return

    def write_page() -> dict[str, str]:
        from .report import Report

        file = Path(folder) / f"ub_overlap_{plan.phase}_{plan.digest[:16]}_{os.getpid()}.html"  # ranks may share the folder
        page = Report([plan]).to_html(file, plan.phase)
        return {"name": f"ub_overlap_page_{plan.phase}", "url": page.resolve().as_uri()}

    compat.trace_structured("link", metadata_fn=write_page)
