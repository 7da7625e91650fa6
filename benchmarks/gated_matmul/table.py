"""The tables of gated_matmul."""

from __future__ import annotations

from math import exp, log
from typing import Any


def best(us: dict[str, float], prefix: str) -> float:
    """Return the least time of the variants whose names begin with `prefix`; NaN without one."""
    found = [value for name, value in us.items() if name.startswith(prefix)]
    return min(found) if found else float("nan")


def text(document: dict[str, Any]) -> str:
    """Return all tables, as text."""
    lines = []
    for part, one in TABLES.items():
        rows = [row for row in document.get(part, []) if "failed" not in row]
        if not rows:
            continue
        cells = [one(row) for row in rows]
        names = list(cells[0])
        lines += ["", f"{'shape':32}" + "".join(f"{name:>12}" for name in names)]
        for row, cell in zip(rows, cells, strict=True):
            lines.append(f"{_name(row):32}" + "".join(_number(cell[name]) for name in names))
        ratios = [name for name in names if "/" in name]
        means = [f"{name} {exp(sum(log(cell[name]) for cell in cells) / len(cells)):.3f}" for name in ratios]
        lines.append(f"geometric means of {len(cells)}: {', '.join(means)}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:12.3f}" if value < 20 else f"{value:12.0f}"


def _name(row: dict[str, Any]) -> str:
    shape = row["shape"]
    return f"{shape['model']} {shape['what']} tp{shape['ranks']} {shape['m']}x{shape['n']}x{shape['k']}"


def _speed(row: dict[str, Any]) -> dict[str, float]:
    us = row["us"]
    return {
        "cublas us": us["cublas"],
        "pieces/cu": us["pieces"] / us["cublas"],
        "cu/whole": us["cublas"] / best(us, "whole"),
        "cu/shards": us["cublas"] / best(us, "shards"),
        "pc/shards": us["pieces"] / best(us, "shards"),
        "cu/quack": us["cublas"] / best(us, "quack whole"),
        "cu/quacksh": us["cublas"] / best(us, "quack shards"),
    }


def _steady(row: dict[str, Any]) -> dict[str, float]:
    alone = row["alone"]
    us = {name: values["us"] for name, values in alone.items()}
    return {
        "cublas us": us["cublas"],
        "pieces/cu": us["pieces"] / us["cublas"],
        "p srch/cu": best(us, "pieces searched") / us["cublas"],
        "cu/srch": us["cublas"] / best(us, "cublas searched"),
        "cu/whole": us["cublas"] / best(us, "whole"),
        "cu/shards": us["cublas"] / best(us, "shards"),
        "cu/quack": us["cublas"] / best(us, "quack whole"),
        "cu MHz": alone["cublas"]["mhz"],
        "cu W": alone["cublas"]["watts"],
    }


def _alone(row: dict[str, Any]) -> dict[str, float]:
    us = {name: values["us"] for name, values in row["alone"].items()}
    return {
        "G us": us["whole"],
        "P/G": best(us, "pieces") / us["whole"],
        "S/G": best(us, "gated") / us["whole"],
        "S/P": best(us, "gated") / best(us, "pieces"),
    }


def _bounds(us: dict[str, float]) -> dict[str, float]:
    """Return the columns of the whole matmul, the transfer, and the longer of both, which bounds every form."""
    return {"G us": us["whole"], "transfer us": us["transfer"], "M us": max(us["whole"], us["transfer"])}


def _departures(row: dict[str, Any]) -> dict[str, float]:
    us = row["us"]
    bounds = _bounds(us)
    ideal = bounds["M us"]
    return {
        **bounds,
        "P/M": us["pieces"] / ideal,
        "S/M": min(value for name, value in us.items() if name.startswith("counted ") and "alone" not in name) / ideal,
        "alone/G": best(us, "counted alone") / us["whole"],
        "plain/G": best(us, "not counted") / us["whole"],
    }


def _arrivals(row: dict[str, Any]) -> dict[str, float]:
    us = row["us"]
    bounds = _bounds(us)
    ideal = bounds["M us"]
    return {
        **bounds,
        "P/M": min(us["pieces 1"], us["pieces 2"]) / ideal,
        "P srch/M": best(us, "pieces 1, searched") / ideal,
        "P cut/M": us["pieces 1, last cut"] / ideal,
        "S/M": best(us, "gated plain") / ideal,
        "S cut/M": best(us, "gated, last cut") / ideal,
        "but last/M": best(us, "gated but last") / ideal,
        "quack/M": best(us, "quack gated") / ideal,
        "next to/M": us["whole next to"] / ideal,
        "open/G": best(us, "gate open") / us["whole"],
    }


TABLES = {
    "speed": _speed,
    "steady": _steady,
    "arrivals": _arrivals,
    "arrivals_steady": _alone,
    "departures": _departures,
}
