"""Tables of a stored measurement of ops: ratios, geometric means. No torch is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ub_overlap.compiler.text.table import render_table

NONE = "-"
KEEPS = ("keep", "keep:engine")
"""Columns of gathers that also return the gathered tensor: copied by kernels, and by the driver."""
MEMORY_TB_S = 4.2
"""Rate at which the driver copies local memory of an H200, bytes read and written: no sum can be faster."""


def strategies_of(ms: dict[str, float], prefix: str) -> dict[str, float]:
    """Return ms of ours by strategy, without the columns that also return the gathered tensor."""
    strategies = {name.removeprefix(prefix): t for name, t in ms.items() if name.startswith(prefix)}
    return {name: t for name, t in strategies.items() if name not in KEEPS}


def derive(row: dict[str, Any]) -> dict[str, Any]:
    """Return the best strategy of a row and its ratios, None for missing columns. Graph times if available."""
    ms, host = row["ms"], row.get("host_us") or {}
    graphs, eager = strategies_of(ms, "ours_g "), strategies_of(ms, "ours ")
    best = min(graphs or eager, key=(graphs or eager).__getitem__, default=None)
    time = (graphs or eager).get(best) if best else None
    rivals = {name: ms[name] for name in (("seq_g", "torch_g") if graphs else ("seq", "torch")) if name in ms}
    rival = min(rivals, key=rivals.__getitem__, default=None)
    with_sum = add(ms.get("B"), sum_ms(row))
    floor, push, last = ms.get("B"), ms.get("push"), ms.get(f"last {best}")
    return {
        "best": best,
        "ours": min(eager.values(), default=None),
        "ours_g": min(graphs.values(), default=None),
        "T/B": ratio(time, floor),
        "B + sum": with_sum,
        "T/(B + sum)": ratio(time, with_sum),
        "bound": ratio(last + push, floor) if last and push else None,
        "split": ratio(ms.get(f"cut {best}"), ms.get("gemm")),
        "eager/graph": ratio(min(eager.values(), default=None), min(graphs.values(), default=None)),
        "cast": min(strategies_of(ms, "ours_cast ").values(), default=None),
        "wire": min(strategies_of(ms, "ours_wire ").values(), default=None),
        "rival": rival,
        "gain": ratio(rivals[rival], time) if rival else None,
        "host_us": host.get(f"ours {best}"),
    }


def sum_ms(row: dict[str, Any]) -> float | None:
    """Return the least time of a reduce_scatter's sum, None for other rows.

    A rank reads R shards of its rows and writes one: (R + 1) / R * M * N * 2 bytes."""
    if row.get("kind") != "RS" or not row.get("ranks"):
        return None
    return 1e3 * (row["ranks"] + 1) / row["ranks"] * row["M"] * row["N"] * 2 / (MEMORY_TB_S * 1e12)


def add(a: float | None, b: float | None) -> float | None:
    return a + b if a and b else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None."""
    known = [v for v in values if v]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def show(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def short(strategy: str | None) -> str:
    named = (strategy or NONE).replace("pipelined:chunks=", "").replace("pipelined:stripes=", "stripes ")
    return named.replace("pipelined", "1 per rank")


def main_table(rows: list[dict[str, Any]], style: str) -> str:
    """Return times and ratios by row, without columns that no row has."""
    heads = [
        "op",
        "M,N,K",
        "GEMM",
        "NCCL",
        "push",
        "**B**",
        "B + sum",
        "seq",
        "seq (g)",
        "torch",
        "torch (g)",
        "ours",
        "ours (g)",
    ]
    heads += ["chunks", "T/B", "T/(B + sum)", "bound", "split", "eager/graph", "best rival", "rival/ours", "host us"]
    more = {"cast": "quantize + ours", "wire": "ours, float8 wire"}
    more = {key: head for key, head in more.items() if any(derive(row)[key] for row in rows)}
    heads += more.values()
    lines = []
    for row in rows:
        d, ms = derive(row), row["ms"]
        times = [show(ms.get(name)) for name in ("gemm", "nccl", "push", "B")] + [show(d["B + sum"])]
        times += [show(ms.get(name)) for name in ("seq", "seq_g", "torch", "torch_g")]
        ratios = [show(d[name], 2) for name in ("T/B", "T/(B + sum)", "bound", "split", "eager/graph")]
        line = [f"{row['kind']} {row['name']}", f"{row['M']},{row['N']},{row['K']}", *times, show(d["ours"]), show(d["ours_g"])]
        line += [short(d["best"]), *ratios, d["rival"] or NONE, show(d["gain"], 2), show(d["host_us"], 0)]
        lines.append([*line, *(show(d[key]) for key in more)])
    table = [dict(zip(heads, line, strict=True)) for line in lines]
    known = [head for head in heads if any(line[head] != NONE for line in table)]
    return render_table([{head: line[head] for head in known} for line in table], style=style)


def strategy_table(rows: list[dict[str, Any]], style: str) -> str:
    """Return graph and eager times by strategy."""
    names = sorted({s for row in rows for p in ("ours ", "ours_g ") for s in strategies_of(row["ms"], p)}, key=_chunks)
    heads = ["op", "M"] + [f"{short(s)}{kind}" for s in names for kind in ("", " (g)")] + [f"{name} (g)" for name in KEEPS]
    lines = []
    for row in rows:
        ms = row["ms"]
        times = [show(ms.get(f"{kind} {s}")) for s in names for kind in ("ours", "ours_g")]
        lines.append([f"{row['kind']} {row['name']}", row["M"], *times, *(show(ms.get(f"ours_g {name}")) for name in KEEPS)])
    return render_table([dict(zip(heads, line, strict=True)) for line in lines], style=style)


def _chunks(strategy: str) -> int:
    return int(strategy.partition("chunks=")[2] or 0)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the summary lines: the quantities of the targets."""
    lines = []
    for kind in ("AG", "RS"):
        full = [row for row in rows if row["kind"] == kind and row["M"] == 8192 and derive(row)["T/B"]]
        if not full:
            continue
        others = {name: mean(ratio(row["ms"].get(name), row["ms"].get("B")) for row in full) for name in ("torch_g", "seq_g")}
        bound, eager = mean(derive(row)["bound"] for row in full), [derive(row)["eager/graph"] for row in full]
        text = (
            f"{kind}, {len(full)} rows of M 8192, geometric mean: ours {show(mean(derive(row)['T/B'] for row in full), 2)} x B"
        )
        if with_sum := mean(derive(row)["T/(B + sum)"] for row in full):
            text += f", {with_sum:.2f} x (B + sum)"
        text += f" (bound {show(bound, 2)}), torch {show(others['torch_g'], 2)}, NCCL + cuBLAS {show(others['seq_g'], 2)};"
        lines.append(f"{text} eager/graph at most {show(max((e for e in eager if e), default=None), 2)}")
    for title, fits in (("M >= 2048", lambda m: m >= 2048), ("M < 2048", lambda m: m < 2048)):
        gains = {f"{r['kind']} {r['name']} {r['M']}": g for r in rows if fits(r["M"]) and (g := derive(r)["gain"])}
        if gains:
            least = min(gains, key=gains.__getitem__)
            lost = sum(g < 0.98 for g in gains.values())
            where = f"{title}, {len(gains)} rows, better rival / ours"
            lines.append(
                f"{where}: mean {show(mean(gains.values()), 2)}, least {gains[least]:.2f} ({least}), {lost} under 0.98"
            )
    rates = {f"{row['kind']} {row['name']} {row['M']}": row["reduce_gbs"] for row in rows if row.get("reduce_gbs")}
    if rates:
        best = max(rates, key=rates.__getitem__)
        lines.append(
            f"kernel that sums received shards, GB/s read and written: median {sorted(rates.values())[len(rates) // 2]:.0f}, "
            f"maximum {rates[best]:.0f} ({best})"
        )
    hosts = [t for row in rows for name, t in (row.get("host_us") or {}).items() if name.startswith("ours")]
    theirs = [row["host_us"]["torch"] for row in rows if "torch" in (row.get("host_us") or {})]
    if hosts:
        hosts.sort()
        lines.append(f"host time of one op of ours: median {hosts[len(hosts) // 2]:.0f} us, maximum {hosts[-1]:.0f} us")
    if theirs:
        lines[-1] += f"; torch's fused ops: median {sorted(theirs)[len(theirs) // 2]:.0f} us"
    return "\n".join(lines)


def missing(rows: list[dict[str, Any]]) -> str:
    """Return the reasons for missing times, each once, with its number of rows."""
    counts: dict[str, int] = {}
    for row in rows:
        for name, why in row["why"].items():
            counts[f"{name}: {why}"] = counts.get(f"{name}: {why}", 0) + 1
    return "\n".join(f"no {text} ({count} row{'s' * (count > 1)})" for text, count in counts.items())


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return all tables, for a terminal ("simple") or for Markdown ("github")."""
    rows = document["rows"]
    if not rows:
        return "no rows"
    parts = [document.get("mirror", ""), main_table(rows, style), summary(rows), strategy_table(rows, style), missing(rows)]
    return "\n\n".join(part for part in parts if part)
