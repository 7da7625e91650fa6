"""Waterfall of captured or marked steps: where the time of a variant goes, by class of kernel, against "compute".

Pure functions over the events of a profiler trace; no torch is needed. Each instant of a step belongs to one class:

    a compute kernel runs            its class, whatever else runs
    else a wait or flag kernel       "waits" or "begin, end, signals"
    else a copy by the driver        "copies by the driver"
    else a NCCL kernel               "NCCL, exposed"
    else a push to a peer            "pushes, exposed"
    nothing runs                     "gaps"

So the classes of a step add up to its time, and the differences of two steps' classes to the difference of the steps.
A push that a matmul hides costs nothing here, and what it costs the matmul shows in the matmul.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ub_overlap.compiler.text.table import render_table
from ub_overlap.tools import trace_events
from ub_overlap.tools.trace_events import Event, Span, span

OWN_MATMULS, MATMULS, PUSHES, NCCL, COPIES = (
    "matmuls in our ops", "other matmuls", "pushes, exposed", "NCCL, exposed", "copies by the driver",
)  # fmt: skip
WAITS, FLAGS, GAPS, OTHER = "waits", "begin, end, signals", "gaps", "other kernels"
_OURS = {
    FLAGS: re.compile(r"\b(begin|end|signal|stamp)_kernel"),
    WAITS: re.compile(r"\bwait_kernel"),
    "sums": re.compile(r"\breduce\w*_kernel"),
    "casts": re.compile(
        r"\b(\w*cast|cast_both|\w*amax\w*|checksum|round|\w*quantize\w*|advance|raise)_kernel"
    ),  # and histories
    "transposed copies": re.compile(r"\btranspose_kernel"),
    "local copies": re.compile(r"\b(\w*copy|order)_kernel"),
}
"""Kernels of ub_overlap by class; the first match counts."""
_OTHERS = {
    "Inductor's kernels": re.compile(r"^triton_"),
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE),
    MATMULS: re.compile(r"gemm|nvjet|cutlass|cublas|splitk|xmma|gemv", re.IGNORECASE),
    "ATen's kernels": re.compile(r"\bat::native\b|\bat_cuda_detail\b"),
}
CLASSES = (
    OWN_MATMULS, MATMULS, "attention", "Inductor's kernels", "ATen's kernels", "sums", "local copies", "casts",
    "transposed copies", "other kernels of ours", FLAGS, WAITS, COPIES, NCCL, PUSHES, "memsets", GAPS, OTHER,
)  # fmt: skip
_COMMUNICATION = ("sums", "local copies", FLAGS, WAITS, NCCL, PUSHES)
"""Classes of communication that nothing hides."""
_MARK = re.compile(r"\bspin_kernel\b")
_BEHIND_COMPUTE = {FLAGS: 1, WAITS: 1, "memsets": 2, COPIES: 2, NCCL: 3, PUSHES: 4}
"""Rank of the classes that count only where no class of a lower rank runs; all others have rank 0."""


@dataclass(slots=True)
class StepTimes:
    """Microseconds of one step by class, and by class and kernel. Both add up to `total_us`.

    `busy`: microseconds in which a class runs, also where it does not count."""

    total_us: float = 0.0
    classes: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)


def measure_steps(events: Iterable[Event]) -> list[StepTimes]:
    """Return the times of every captured step in a trace of one process, in order. ValueError if there is none."""
    rows = list(events)
    work = sorted((e for e in rows if trace_events.is_device_work(e)), key=lambda e: span(e)[0])
    launches = {
        _correlation(e) for e in rows if isinstance(e, dict) and str(e.get("name")) in ("cudaGraphLaunch", "cuGraphLaunch")
    }
    replays: dict[Any, list[Span]] = defaultdict(list)
    for e in work:
        if (launch := _correlation(e)) is not None and launch in launches:
            replays[launch].append(span(e))
    if not replays:
        what = f"{len(work)} device events, {len(launches)} launches of graphs"
        raise ValueError(
            f"no captured step in the trace: expected device events with the correlation of a graph launch, got {what}"
        )
    return _measure_extents(work, sorted((min(s[0] for s in spans), max(s[1] for s in spans)) for spans in replays.values()))


def measure_marked_steps(events: Iterable[Event]) -> list[StepTimes]:
    """Return the times of every eager step between two marks (torch.cuda._sleep), in order. ValueError for an odd number."""
    work = sorted((e for e in events if trace_events.is_device_work(e)), key=lambda e: span(e)[0])
    marks = [span(e) for e in work if _MARK.search(str(e.get("name")))]
    if not marks or len(marks) % 2:
        raise ValueError(
            f"no marked step in the trace: expected pairs of {_MARK.pattern}, got {len(marks)} of {len(work)} events"
        )
    return _measure_extents(work, [(a[1], b[0]) for a, b in zip(marks[::2], marks[1::2], strict=True)])


def _measure_extents(work: Sequence[Event], extents: Sequence[Span]) -> list[StepTimes]:
    return [_measure_step([e for e in work if begin <= span(e)[0] and span(e)[1] <= end], begin, end) for begin, end in extents]


def middle_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the step of the median time."""
    return sorted(steps, key=lambda step: step.total_us)[len(steps) // 2]


def _correlation(e: Event) -> Any:
    return (e.get("args") or {}).get("correlation")


def _measure_step(work: Sequence[Event], begin: float, end: float) -> StepTimes:
    with_kernels, calls = trace_events.streams_with_kernels(work), _own_calls(work)
    named = [(class_of(e, with_kernels, calls), _short(str(e.get("name"))), span(e)) for e in work]
    step = StepTimes(end - begin)
    busy: dict[str, list[Span]] = defaultdict(list)
    for kind, _, when in named:
        busy[kind].append(when)
    step.busy = {kind: trace_events.total(trace_events.union(spans)) for kind, spans in busy.items()}
    for (kind, name), us in attribute(named, begin, end).items():
        step.classes[kind] = step.classes.get(kind, 0.0) + us
        step.kernels.setdefault(kind, {})[name] = us
    return step


def _own_calls(work: Sequence[Event]) -> list[Span]:
    """Return the time of each call of our ops: from its first kernel to its last one. Other work of the stream is not in it."""
    calls: list[Span] = []
    begun = None
    for e in work:
        name = str(e.get("name"))
        if e["cat"] != "kernel" or not trace_events.OURS.search(name):
            continue
        if re.search(r"\bbegin_kernel", name):
            begun = span(e)[0]
        elif re.search(r"\bend_kernel", name) and begun is not None:
            if calls and calls[-1][0] == begun:  # a call with many outputs ends with several launches
                calls.pop()
            calls.append((begun, span(e)[1]))
    return calls


def class_of(e: Event, with_kernels: set[Any], calls: Sequence[Span]) -> str:
    """Return the class of a device event. `calls`: of `_own_calls`."""
    name = str(e.get("name"))
    if e["cat"] == "gpu_memset":
        return "memsets"
    if e["cat"] == "gpu_memcpy":
        return PUSHES if trace_events.is_peer_copy(e, with_kernels) else COPIES
    if trace_events.OURS.search(name):
        return next((kind for kind, pattern in _OURS.items() if pattern.search(name)), "other kernels of ours")
    if trace_events.NCCL.match(name):
        return NCCL
    kind = next((kind for kind, pattern in _OTHERS.items() if pattern.search(name)), OTHER)
    at = span(e)[0]
    return OWN_MATMULS if kind == MATMULS and any(begin <= at < end for begin, end in calls) else kind


def attribute(named: Sequence[tuple[str, str, Span]], begin: float, end: float) -> dict[tuple[str, str], float]:
    """Return microseconds by (class, kernel), each instant counted once. A gap has the name of the class behind it.

    Of several events of the lowest rank, the one that began first counts."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    edges = sorted({begin, end, *(t for _, _, when in named for t in when)})
    active: list[tuple[int, float, int]] = []  # rank, begin, number
    pending = sorted(range(len(named)), key=lambda i: named[i][2][0])
    at = 0
    for left, right in itertools.pairwise(edges):
        while at < len(pending) and named[pending[at]][2][0] <= left:
            kind, _, (first, _) = named[pending[at]]
            active.append((_BEHIND_COMPUTE.get(kind, 0), first, pending[at]))
            at += 1
        active = [entry for entry in active if named[entry[2]][2][1] > left]
        if active:
            kind, name, _ = named[min(active)[2]]
            times[kind, name] += right - left
        else:
            behind = named[pending[at]][0] if at < len(pending) else "the end"
            times[GAPS, f"before {behind}"] += right - left
    return dict(times)


def _short(name: str) -> str:
    """Return a kernel's name without its arguments, its return type, and the number that Inductor appends."""
    if name.startswith("triton_"):
        return re.sub(r"_\d+$", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = name.removeprefix("void ")
    return (name if name.startswith("Mem") else re.split(r"[<(]", name)[0]) or name


def compare(steps: dict[str, StepTimes], measured_ms: dict[str, float], base: str = "compute") -> dict[str, Any]:
    """Return the waterfall as JSON values: each variant's classes, and for all but `base` the differences from it.

    `measured_ms`: the captured step of each variant without a profiler. "named": the share of that difference which known
    classes explain; kernels of unknown names and what the profiler itself adds are not explained."""
    document: dict[str, Any] = {"base": base, "variants": {}}
    for name, step in steps.items():
        entry: dict[str, Any] = {
            "profiled_us": step.total_us,
            "classes": step.classes,
            "busy": step.busy,
            "kernels": step.kernels,
        }
        if name in measured_ms:
            entry["measured_us"] = 1e3 * measured_ms[name]
        document["variants"][name] = entry
    for name, entry in document["variants"].items():
        if name == base or base not in steps:
            continue
        difference = {kind: entry["classes"].get(kind, 0.0) - steps[base].classes.get(kind, 0.0) for kind in CLASSES}
        entry["difference"] = {kind: us for kind, us in difference.items() if us}
        profiled = entry["profiled_us"] - steps[base].total_us
        whole = entry["measured_us"] - 1e3 * measured_ms[base] if base in measured_ms and name in measured_ms else profiled
        entry["difference_us"] = whole
        entry["named"] = named_share(whole, profiled - difference[OTHER])
    return document


def by_rank(ranks: Sequence[dict[str, StepTimes]]) -> dict[str, dict[str, list[float]]]:
    """Return what each rank waits and what communication it exposes in all, in microseconds, by variant; none exposes nothing.

    A rank that computes faster than its peers waits for them, in our kernels or in NCCL's. So the least of the ranks is
    taken for what the communication itself costs.
    """
    found = {}
    for name in ranks[0]:
        steps = [of_rank[name] for of_rank in ranks]
        exposed = [communication_us({"classes": step.classes}) for step in steps]
        if any(exposed):
            found[name] = {"waits": [step.classes.get(WAITS, 0.0) for step in steps], "exposed": exposed}
    return found


def communication_us(entry: dict[str, Any]) -> float:
    """Return the exposed communication of a variant in microseconds, with its sums, and copies of what landed."""
    return float(sum(entry["classes"].get(kind, 0.0) for kind in _COMMUNICATION))


def named_share(whole: float, named: float) -> float | None:
    """Return the share of a difference that is named, None where there is none. Naming too much counts as an error."""
    return 1.0 - abs(whole - named) / abs(whole) if whole else None


def section(row: dict[str, Any], what: str, style: str) -> list[str]:
    """Return the paragraphs on the waterfall of a row of a document, none where none was measured. `what`: what a step runs."""
    if "waterfall" not in row:
        return []
    kind, rank = "eager" if row["waterfall"].get("is_eager") else "captured", row["waterfall"].get("rank", 0)
    parts = [f"{kind} step of {what}, microseconds by class, rank {rank}", text(row["waterfall"], style)]
    if ranks := row["waterfall"].get("ranks"):
        rows = [
            {"of each rank, us": name, "exposed communication": _listed(v["exposed"]), "of these, waits": _listed(v["waits"])}
            for name, v in ranks.items()
        ]
        parts.append(render_table(rows, style=style))
    return parts


def _listed(us: Sequence[float]) -> str:
    return ", ".join(f"{one:.0f}" for one in us)


def text(waterfall: dict[str, Any], style: str = "simple", kernels: int = 12) -> str:
    """Return two tables: microseconds by class, and the kernels whose time differs most from that in the base variant."""
    variants, base = waterfall["variants"], waterfall["base"]
    others = [name for name in variants if name != base]
    rows = []
    for kind in CLASSES:
        if any(v["classes"].get(kind) for v in variants.values()):
            rows.append(_row(kind, variants, others, {n: v["classes"].get(kind, 0.0) for n, v in variants.items()}, base))
    us = {name: communication_us(entry) for name, entry in variants.items()}
    rows.append(_row("of these, exposed communication", variants, others, us, base))
    rows.append(_row("step, profiled", variants, others, {n: v["profiled_us"] for n, v in variants.items()}, base))
    if all("measured_us" in v for v in variants.values()):
        rows.append(_row("step, not profiled", variants, others, {n: v["measured_us"] for n, v in variants.items()}, base))
    shares = {n: variants[n].get("named") for n in others}
    lines = [f"{n} - {base}: {share:.0%} of the difference is named" for n, share in shares.items() if share is not None]
    details = [_kernel_table(variants[n], variants[base], n, base, style, kernels) for n in others if base in variants]
    return "\n\n".join([render_table(rows, style=style), "\n".join(lines), *details]).strip()


def _row(title: str, variants: dict[str, Any], others: list[str], us: dict[str, float], base: str) -> dict[str, str]:
    row = {"class, us": title} | {name: f"{us[name]:.0f}" for name in variants}
    return row | {f"{name} - {base}": f"{us[name] - us[base]:+.0f}" for name in others if base in us}


def _kernel_table(entry: dict[str, Any], base_entry: dict[str, Any], name: str, base: str, style: str, count: int) -> str:
    """Return the kernels with the largest differences."""
    pairs = {(kind, k) for e in (entry, base_entry) for kind, named in e["kernels"].items() for k in named}
    both = {pair: tuple(e["kernels"].get(pair[0], {}).get(pair[1], 0.0) for e in (entry, base_entry)) for pair in pairs}
    largest = sorted(both, key=lambda pair: -abs(both[pair][0] - both[pair][1]))[:count]
    rows = [
        {"kernel": k[:70], "class": kind, name: f"{both[kind, k][0]:.0f}", base: f"{both[kind, k][1]:.0f}",
         f"{name} - {base}": f"{both[kind, k][0] - both[kind, k][1]:+.0f}"}
        for kind, k in largest
    ]  # fmt: skip
    return render_table(rows, style=style)
