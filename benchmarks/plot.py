"""Plot stored measurements. Without matplotlib a message is printed instead."""

from __future__ import annotations

from typing import Any

from .ops.table import derive, ratio

COLORS = {"NCCL + cuBLAS": "#9aa0a6", "torch symm_mem": "#e8a33d", "ub_overlap": "#1f6fb4"}


def draw(document: dict[str, Any], path: str) -> str:
    """Write the PNG of a document to `path`. Return a message."""
    try:
        import matplotlib
    except ImportError:
        return f"{path} is not drawn: matplotlib is not installed (pip install matplotlib, then python -m benchmarks.report)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = (_ops if document["benchmark"] == "ops" else _blocks)(document, pyplot)
    if figure is None:
        return f"{path} is not drawn: no times to compare"
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return f"{path} is drawn"


def _title(document: dict[str, Any]) -> str:
    devices = document["devices"]
    mirrored = f"{document['ranks']} ranks in mirror mode on " if document.get("mirror") else ""
    return f"{mirrored}{len(devices)} x {devices[0]}, torch {document['torch']}, {document['date']}"


def _ops(document: dict[str, Any], pyplot: Any) -> Any:
    """Draw bars of time over the floor B per row, CUDA graphs; a tick marks the bound of chunking."""
    rows = [row for row in document["rows"] if derive(row)["T/B"]]
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(max(6, 0.55 * len(rows)), 4))
    for i, (name, color) in enumerate(COLORS.items()):
        bars = []
        for row in rows:
            floor = row["ms"].get("B")
            theirs = {
                "NCCL + cuBLAS": ratio(row["ms"].get("seq_g"), floor),
                "torch symm_mem": ratio(row["ms"].get("torch_g"), floor),
            }
            bars.append(theirs.get(name, derive(row)["T/B"]) or 0)
        axes.bar([x + 0.27 * (i - 1) for x in range(len(rows))], bars, 0.27, label=name, color=color)
    for x, row in enumerate(rows):
        if bound := derive(row)["bound"]:
            axes.plot([x + 0.13, x + 0.41], [bound, bound], color="black", linewidth=1.5)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(rows)), [f"{row['kind']} {row['name']}\nM {row['M']}" for row in rows], rotation=90, fontsize=7)
    axes.set_ylabel("time / B (lower is better)")
    axes.set_ylim(0, min(4, axes.get_ylim()[1]))
    axes.legend(fontsize=8)
    axes.set_title(_title(document), fontsize=9)
    return figure


def _blocks(document: dict[str, Any], pyplot: Any) -> Any:
    """Draw bars of step time per variant, forward + backward and forward, one panel per size."""
    sizes = [size for size in document["rows"] if size["variants"]]
    if not sizes:
        return None
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), squeeze=False)
    for axes, size in zip(panels[0], sizes, strict=True):
        names = [name for name, v in size["variants"].items() if v.get("step")]
        for i, what in enumerate(("step", "forward")):
            values = [size["variants"][name].get(what) or 0 for name in names]
            label = "forward + backward" if what == "step" else "forward, no grad"
            axes.bar([x + 0.4 * (i - 0.5) for x in range(len(names))], values, 0.4, label=label)
        axes.set_xticks(range(len(names)), names, rotation=30, fontsize=8)
        axes.set_ylabel("ms")
        axes.set_title(f"{size['size']} block, {_title(document)}", fontsize=8)
        axes.legend(fontsize=8)
    return figure
