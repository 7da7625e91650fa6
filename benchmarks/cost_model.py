"""Compare the cost model with stored measurements: python -m benchmarks.cost_model [--profile h200] [docs/data/ops_*.json ...]

Read tables of benchmarks.ops and predict every row for every timed strategy; no GPU is needed. Times are those of CUDA graphs
(ours_g, seq_g), which the host does not slow down. On the CPU they are those of eager calls.

    error     predicted / measured - 1
    regret    measured time of the selected strategy over the best measured one - 1
    gain      measured time of the plain strategy over that of the selected strategy
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ub_overlap.compiler.cost import Profile, SiteShape, choose, load, predict
from ub_overlap.compiler.cost.profile_lookup import fallback
from ub_overlap.compiler.plan.strategy import Strategy
from ub_overlap.compiler.text.table import render_table
from ub_overlap.runtime.errors import UbOverlapError

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"


@dataclass
class PredictedRow:
    """One row of a stored table: `measured` and `predicted` microseconds by strategy, and the selected strategy."""

    title: str
    ranks: int
    chosen: str
    measured: dict[str, float]
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, float]:
        return {name: self.predicted[name] / us - 1 for name, us in self.measured.items()}

    @property
    def regret(self) -> float | None:
        """None if the selected strategy was not timed."""
        at = self.measured.get(self.chosen)
        return None if at is None else at / min(self.measured.values()) - 1

    @property
    def gain(self) -> float | None:
        at, plain = self.measured.get(self.chosen), self.measured.get("none")
        return None if at is None or plain is None else plain / at


def shape_of(row: dict[str, Any], dtype: str) -> SiteShape:
    """Return the site of a stored row. Float8 products gather float8 and scatter `dtype`."""
    ranks, operands = row["ranks"], "float8" if row.get("fp8") else ""
    if row["kind"] == "AG":
        matmul = (row["M"], row["N"] // ranks, row["K"], False)
        return SiteShape("all_gather_matmul", ranks, operands or dtype, (matmul,), row["M"], row["K"], operands=operands)
    matmul = (row["M"], row["N"], row["K"] // ranks, False)
    return SiteShape("matmul_reduce_scatter", ranks, dtype, (matmul,), row["M"], row["N"], operands=operands)


def measured_times(row: dict[str, Any]) -> dict[str, float]:
    """Return measured microseconds by strategy, as graphs if available."""
    ms = row["ms"]
    graphs = any(name.startswith("ours_g pipelined") for name in ms)
    ours, plain = ("ours_g ", "seq_g") if graphs else ("ours ", "seq")
    times = {"none": 1e3 * ms[plain]} if plain in ms else {}
    for name, value in ms.items():
        if name.startswith((ours + "pipelined", ours + "direct")):
            times[str(Strategy.parse(name.removeprefix(ours)))] = 1e3 * value
    return times


def rows_of(document: dict[str, Any], profile: Profile) -> list[PredictedRow]:
    """Return every row with times. Only timed strategies can be selected, so the regret is known."""
    rows = []
    for row in document["rows"]:
        times = measured_times(row)
        if not times:
            continue
        shape = shape_of(row, document["dtype"])
        predicted = {name: predict(shape, Strategy.parse(name), profile).us for name in times}
        chosen = str(choose(shape, profile, timed=tuple(times)).strategy)
        rows.append(PredictedRow(f"{row['kind']} {row['name']} {row['M']}", row["ranks"], chosen, times, predicted))
    return rows


def table(rows: Sequence[PredictedRow]) -> str:
    """Return one line per row: predicted / measured microseconds of every strategy, the selected one marked."""
    names = list(dict.fromkeys(name for row in rows for name in row.measured))
    lines = []
    for row in rows:
        cells: dict[str, Any] = {"op": row.title, "TP": row.ranks}
        for name in names:
            if name in row.measured:
                mark = "*" if name == row.chosen else ""
                cells[name] = f"{row.predicted[name]:.0f} / {row.measured[name]:.0f} {row.errors[name]:+.1%}{mark}"
        cells["regret"] = "-" if row.regret is None else f"{row.regret:.1%}"
        cells["gain"] = "-" if row.gain is None else f"{row.gain:.2f}"
        lines.append(cells)
    return render_table(lines)


def summary(rows: Sequence[PredictedRow]) -> dict[str, float]:
    """Return median and p90 of |error|, regret of the selection, and its gain over the plain strategy."""
    off = sorted(abs(error) for row in rows for error in row.errors.values())
    regrets = [row.regret for row in rows if row.regret is not None]
    gains = [row.gain for row in rows if row.gain is not None]
    return {
        "rows": len(rows),
        "times": len(off),
        "median error": statistics.median(off) if off else 0.0,
        "p90 error": off[min(len(off) - 1, int(0.9 * len(off)))] if off else 0.0,
        "mean regret": statistics.mean(regrets) if regrets else 0.0,
        "worst regret": max(regrets, default=0.0),
        "least gain": min(gains, default=0.0),
        "mean gain": statistics.geometric_mean(gains) if gains else 0.0,
    }


def summary_text(rows: Sequence[PredictedRow]) -> str:
    s = summary(rows)
    has_gains = any(row.gain is not None for row in rows)
    gains = f"mean {s['mean gain']:.2f}x, least {s['least gain']:.2f}x" if has_gains else "not timed"
    return (
        f"{s['times']} times of {s['rows']} rows: "
        f"median |error| {s['median error']:.1%}, 90th percentile {s['p90 error']:.1%}; "
        f"regret of the selection mean {s['mean regret']:.1%}, worst {s['worst regret']:.1%}; "
        f"auto against the plain strategy {gains}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="stored tables of benchmarks.ops (default: docs/data/ops_*.json)")
    parser.add_argument("--profile", help="a shipped profile's name, or a path (default: the shipped one of a table's device)")
    parser.add_argument("--json", help="write rows and summary to this file")
    flags = parser.parse_args(argv)
    files = [Path(f) for f in flags.files] or sorted(DATA.glob("ops_*.json"))
    if not files:
        print(f"benchmarks.cost_model: no file given, and no ops_*.json in {DATA}", file=sys.stderr)
        return 1
    every: list[PredictedRow] = []
    try:
        for file in files:
            document = json.loads(file.read_text())
            if document.get("benchmark") != "ops":
                raise ValueError(f"{file}: benchmark is {document.get('benchmark')!r}, expected 'ops'")
            profile = load(flags.profile) if flags.profile else fallback(document["device"], document["devices"][0])
            rows = rows_of(document, profile)
            every += rows
            print(f"{file.name}: {document['ranks']} x {document['devices'][0]}, {document['date']}; profile {profile}")
            print(f"{table(rows)}\n{summary_text(rows)}\n")
    except (OSError, ValueError, KeyError, UbOverlapError) as error:
        print(f"benchmarks.cost_model: {error}", file=sys.stderr)
        return 1
    if len(files) > 1:
        print(f"all: {summary_text(every)}")
    if flags.json:
        stored = [{**vars(row), "errors": row.errors, "regret": row.regret, "gain": row.gain} for row in every]
        Path(flags.json).write_text(json.dumps({"benchmark": "cost_model", **summary(every), "rows": stored}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
