"""The measured properties of a machine: plain numbers, read from JSON, checked field by field.

`python -m ub_overlap calibrate` writes such a file (tools/calibrate); profiles of an H200, an H100 and the CPU executor ship
with the package (profiles/*.json), so that a laptop can plan for an H200. Times are microseconds, sizes bytes, rates GB/s or
TFLOP/s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from ub_overlap.runtime.errors import OptionError, StoredFileError
from ub_overlap.runtime.stored_file import parse_json

from ..plan.reasons import COLLECTIVES
from .curve import Curve
from .fused_curves import FORMS, FUSED_KINDS, FusedTimes, plain_fused
from .network import Network, plain_network

FORMAT = "ub_overlap profile"
VERSION = 1
LAYOUTS = ("nt", "nn", "tn")
"""nt: x @ w.t(), a Linear; nn: its input's gradient; tn: its weight's, x.t() @ y."""
DTYPES = ("bfloat16", "float16", "float32", "float8")
_ADDED = ("all_to_all",)
"""Collectives that earlier versions did not measure. A profile without them is read; they are priced as gathers."""
_AGAIN = "create it again: torchrun --nproc-per-node N -m ub_overlap calibrate"


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """The analytic model of a matmul: `units` work on tiles (rows, columns, efficiency) in waves; see matmul_time.py."""

    units: int
    tiles: tuple[tuple[int, int, float], ...]
    tflops: Mapping[str, float]
    """By dtype, of all units together."""
    wave_us: float
    launch_us: float
    """From one matmul's end to the next one's begin."""
    memory_gbs: float
    layouts: Mapping[str, float]
    """Time relative to "nt"."""
    cache_mib: float = 0.0
    """Last-level cache: an operand that fits stays for the next piece of the same product."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The times of the small steps of a call."""

    begin_us: float
    """The call's first kernel."""
    end_us: float
    """The call's last kernel: it signals that the slot was read."""
    wait_us: float
    """A wait for flags that are already set."""
    arrive_us: float
    """From a flag's write to the end of the wait for it."""
    flag_us: float
    """A flag after a push, on the copy queue."""
    event_us: float
    """From the end of a step to the begin of one on the other queue that waits for it."""
    signal_us: float
    """A flag written from the compute queue."""
    gap_us: float
    """Between a collective and a matmul, one after the other."""


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Measured rates of torch's attention in TFLOP/s, without a mask. `dtype`: in which they were measured."""

    dtype: str
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class DirectStores:
    """Matmuls whose product is stored at the ranks that own its shards (strategy direct); see direct_time.py."""

    link_gbs: float
    """The rate of their stores where the link binds."""
    matmuls: tuple[tuple[str, int, int, int, int, float], ...]
    """Measured: (dtype, ranks, M, N, K of one rank's whole matmul, microseconds)."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Everything that the simulator needs; an immutable value, identified by its digest."""

    name: str
    """ "h200", "cpu", "analytic:<gpu>", or what calibration called it."""
    key: Mapping[str, Any]
    """The machine it was measured on; another machine's key differs."""
    source: str
    """Where the numbers come from, in words."""
    compute: ComputeModel
    matmuls: tuple[tuple[str, str, int, int, int, float], ...]
    """Measured: (layout, dtype, M, N, K, microseconds)."""
    push: Curve
    """Microseconds of one push to a peer, in a row of pushes."""
    copy: Curve
    """A local copy by the compute units, by bytes copied."""
    reduce: Curve
    """A reduction, by bytes read and written."""
    collectives: Mapping[str, Mapping[int, Curve]]
    """Plain collectives by ranks, by bytes that a rank sends."""
    steps: Steps
    matmul_slowdown: float
    """Slowdown of a matmul during transfers: 0.03 is 3% more time while they last."""
    push_slowdown: float
    """Slowdown of transfers during a matmul."""
    checks: tuple[tuple[str, int, str, int, int, int, str, float], ...] = ()
    """Whole calls that were timed: (kind, ranks, dtype, M, N, K of one rank's matmul, strategy, microseconds)."""
    holes: tuple[str, ...] = ()
    """Measurements that failed, with values from another profile."""
    direct: DirectStores | None = None
    """None where they were not measured: then `direct` is not selected."""
    network: Network | None = None
    """Groups across hosts. None: priced as within a host."""
    attention: AttentionRates | None = None
    """None where they were not measured: then they are assumed (attention_time.py)."""
    fused: FusedTimes | None = None
    """Collectives of few tokens as one kernel. None where they were not measured: then none is selected."""
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        text = json.dumps(_plain(self), sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{self.name} {self.digest[:8]}"

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **_plain(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Profile:
        """Read a profile. StoredFileError names `where` (its file), the field, what it got and what it expected."""
        found = parse_json(text, where)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise _broken(where, "format", repr(got), repr(FORMAT), "give the path of a profile")
        if found.get("version") != VERSION:
            raise _broken(where, "version", repr(found.get("version")), repr(VERSION))
        return _Reader(found, where).profile()


def _plain(p: Profile) -> dict[str, Any]:
    """Return a profile as JSON values."""
    direct = {} if p.direct is None else {"direct": _plain_direct(p.direct)}
    network = {} if p.network is None else {"network": plain_network(p.network)}
    fused = {} if p.fused is None else {"fused": plain_fused(p.fused)}
    attention = {} if p.attention is None else {"attention": asdict(p.attention)}
    return {
        "name": p.name,
        "source": p.source,
        "key": dict(p.key),
        "compute": {
            "units": p.compute.units,
            "tiles": [list(t) for t in p.compute.tiles],
            "tflops": dict(p.compute.tflops),
            "wave_us": p.compute.wave_us,
            "launch_us": p.compute.launch_us,
            "memory_gbs": p.compute.memory_gbs,
            "layouts": dict(p.compute.layouts),
            "cache_mib": p.compute.cache_mib,
        },
        "steps": {name: getattr(p.steps, name) for name in Steps.__slots__},
        "slowdown": {"matmul": p.matmul_slowdown, "push": p.push_slowdown},
        "push": _points(p.push),
        "copy": _points(p.copy),
        "reduce": _points(p.reduce),
        "collectives": {k: {str(r): _points(c) for r, c in v.items()} for k, v in p.collectives.items()},
        "matmuls": [[*row[:5], float(row[5])] for row in p.matmuls],
        "checks": [[*row[:7], float(row[7])] for row in p.checks],
        "holes": list(p.holes),
        **direct,
        **network,
        **fused,
        **attention,
    }


def _plain_direct(direct: DirectStores) -> dict[str, Any]:
    return {"link_gbs": direct.link_gbs, "matmuls": [[*row[:5], float(row[5])] for row in direct.matmuls]}


def _points(curve: Curve) -> list[list[float]]:
    return [[float(size), float(us)] for size, us in curve]


class _Reader:
    """Reads a profile from parsed JSON."""

    def __init__(self, found: dict[str, Any], where: str) -> None:
        self.found, self.where = found, where

    def profile(self) -> Profile:
        compute, slowdown = self.part("compute"), self.part("slowdown")
        return Profile(
            name=self.text("name"),
            key=self.part("key"),
            source=self.text("source"),
            compute=ComputeModel(
                units=round(self.number(compute, "compute.units", 1)),
                tiles=self.tiles(compute),
                tflops=self.named(compute, "compute.tflops", DTYPES, "bfloat16"),
                wave_us=self.number(compute, "compute.wave_us"),
                launch_us=self.number(compute, "compute.launch_us"),
                memory_gbs=self.number(compute, "compute.memory_gbs", 1e-3),
                layouts=self.named(compute, "compute.layouts", LAYOUTS, "nt"),
                cache_mib=self.number(compute, "compute.cache_mib"),
            ),
            matmuls=self.matmuls(),
            push=self.curve(self.found.get("push"), "push"),
            copy=self.curve(self.found.get("copy"), "copy"),
            reduce=self.curve(self.found.get("reduce"), "reduce"),
            collectives=self.collectives(),
            steps=Steps(**{name: self.number(self.part("steps"), f"steps.{name}") for name in Steps.__slots__}),
            matmul_slowdown=self.number(slowdown, "slowdown.matmul"),
            push_slowdown=self.number(slowdown, "slowdown.push"),
            checks=self.checks(),
            holes=self.holes(),
            direct=self.direct(),
            network=self.network(),
            fused=self.fused(),
            attention=self.attention(),
        )

    def part(self, name: str) -> dict[str, Any]:
        found = self.found.get(name)
        if not isinstance(found, dict):
            raise self.bad(name, found, "an object")
        return found

    def text(self, name: str) -> str:
        found = self.found.get(name)
        if not isinstance(found, str) or not found:
            raise self.bad(name, found, "a text")
        return found

    def number(self, where: Mapping[str, Any], name: str, least: float = 0.0) -> float:
        found = where.get(name.rpartition(".")[2])
        if not _is_number(found) or found < least:
            raise self.bad(name, found, f"a number of at least {least:g}")
        return float(found)

    def named(self, where: Mapping[str, Any], name: str, names: tuple[str, ...], needed: str) -> dict[str, float]:
        found = where.get(name.rpartition(".")[2])
        if not isinstance(found, dict) or needed not in found or not set(found) <= set(names):
            raise self.bad(name, found, f"numbers by name: {needed}, and perhaps others of {', '.join(names)}")
        return {key: self.number(found, f"{name}.{key}", 1e-6) for key in sorted(found)}

    def tiles(self, compute: Mapping[str, Any]) -> tuple[tuple[int, int, float], ...]:
        found = compute.get("tiles")
        if not isinstance(found, list) or not found:
            raise self.bad("compute.tiles", found, "a list of [rows, columns, efficiency]")
        for number, tile in enumerate(found):
            if (
                not isinstance(tile, list)
                or len(tile) != 3
                or not all(_is_number(x) and x > 0 for x in tile)
                or min(tile[:2]) < 1
            ):
                raise self.bad(f"compute.tiles[{number}]", tile, "[rows, columns, efficiency], all above 0")
        return tuple((int(m), int(n), float(e)) for m, n, e in found)

    def curve(self, found: Any, name: str) -> Curve:
        if not isinstance(found, list) or not found:
            raise self.bad(name, found, "a list of [bytes, microseconds]")
        last = 0.0
        for number, point in enumerate(found):
            if not isinstance(point, list) or len(point) != 2 or not all(_is_number(x) and x > 0 for x in point):
                raise self.bad(f"{name}[{number}]", point, "[bytes, microseconds], both above 0")
            if point[0] <= last:
                raise self.bad(f"{name}[{number}]", point, f"more bytes than the point before, {last:g}")
            last = point[0]
        return rising((float(x), float(y)) for x, y in found)

    def collectives(self) -> dict[str, dict[int, Curve]]:
        found = self.part("collectives")
        out: dict[str, dict[int, Curve]] = {}
        for kind in COLLECTIVES:
            curves = found.get(kind)
            if curves is None and kind in _ADDED:
                continue
            if not isinstance(curves, dict):
                raise self.bad(f"collectives.{kind}", curves, "curves by number of ranks")
            for ranks in curves:
                if not (ranks.isascii() and ranks.isdigit()) or int(ranks) < 2:
                    raise self.bad(f"collectives.{kind}", ranks, "a number of ranks from 2 on, as text")
            by_ranks = sorted(curves, key=int)
            out[kind] = {int(r): self.curve(curves[r], f"collectives.{kind}.{r}") for r in by_ranks}
        return out

    def holes(self) -> tuple[str, ...]:
        found = self.found.get("holes") or []
        if not isinstance(found, list):
            raise self.bad("holes", found, "a list of texts")
        return tuple(map(str, found))

    def matmuls(self) -> tuple[tuple[str, str, int, int, int, float], ...]:
        found = self.found.get("matmuls")
        if not isinstance(found, list):
            raise self.bad("matmuls", found, "a list of [layout, dtype, M, N, K, microseconds]")
        for number, row in enumerate(found):
            good = isinstance(row, list) and len(row) == 6 and row[0] in LAYOUTS and row[1] in DTYPES
            if not good or not all(_is_number(x) and x > 0 for x in row[2:]) or min(row[2:5]) < 1 or row[5] < 1e-3:
                raise self.bad(
                    f"matmuls[{number}]", row, f"[one of {'/'.join(LAYOUTS)}, one of {'/'.join(DTYPES)}, M, N, K, microseconds]"
                )
        return tuple((a, t, int(m), int(n), int(k), float(us)) for a, t, m, n, k, us in found)

    def direct(self) -> DirectStores | None:
        if self.found.get("direct") is None:
            return None
        part = self.part("direct")
        rows = part.get("matmuls")
        if not isinstance(rows, list) or not rows:
            raise self.bad("direct.matmuls", rows, "a list of [dtype, ranks, M, N, K, microseconds]")
        for number, row in enumerate(rows):
            good = isinstance(row, list) and len(row) == 6 and row[0] in DTYPES and all(_is_number(x) for x in row[1:])
            if not good or row[1] < 2 or min(row[2:5]) < 1 or row[5] < 1e-3:
                raise self.bad(
                    f"direct.matmuls[{number}]", row, f"[one of {'/'.join(DTYPES)}, ranks from 2 on, M, N, K, microseconds]"
                )
        known = tuple((t, int(r), int(m), int(n), int(k), float(us)) for t, r, m, n, k, us in rows)
        return DirectStores(self.number(part, "direct.link_gbs", 1e-3), known)

    def network(self) -> Network | None:
        if self.found.get("network") is None:
            return None
        part = self.part("network")
        source, curves = part.get("source"), part.get("collectives", {})
        if not isinstance(source, str) or not source:
            raise self.bad("network.source", source, "a text")
        if not isinstance(curves, dict) or not set(curves) <= set(COLLECTIVES):
            raise self.bad("network.collectives", curves, f"curves of {', '.join(COLLECTIVES)}")
        found: dict[str, dict[tuple[int, int], Curve]] = {}
        for kind, by_size in curves.items():
            for size, points in by_size.items() if isinstance(by_size, dict) else ((by_size, None),):
                ranks, x, hosts = str(size).partition("x")
                if not x or not all(n.isascii() and n.isdigit() for n in (ranks, hosts)) or not 2 <= int(hosts) <= int(ranks):
                    raise self.bad(f"network.collectives.{kind}", size, "ranks and hosts as text, e.g. '16x2'")
                curve = self.curve(points, f"network.collectives.{kind}.{size}")
                found.setdefault(kind, {})[int(ranks), int(hosts)] = curve
        rates = {"gbs": self.number(part, "network.gbs", 1e-3)}
        rates |= {n: self.number(part, f"network.{n}") for n in ("base_us", "step_us", "hop_us", "matmul_slowdown")}
        if "transfer_slowdown" in part:  # not in profiles written before 2026-11-28
            rates["transfer_slowdown"] = self.number(part, "network.transfer_slowdown")
        return Network(source=source, collectives=found, **rates)

    def attention(self) -> AttentionRates | None:
        if self.found.get("attention") is None:
            return None
        part = self.part("attention")
        if part.get("dtype") not in DTYPES:
            raise self.bad("attention.dtype", part.get("dtype"), f"one of {', '.join(DTYPES)}")
        return AttentionRates(part["dtype"], *(self.number(part, f"attention.{n}", 1e-6) for n in ("forward", "backward")))

    def fused(self) -> FusedTimes | None:
        if self.found.get("fused") is None:
            return None
        part = dict(self.part("fused"))
        source = part.pop("source", None)
        if not isinstance(source, str) or not source:
            raise self.bad("fused.source", source, "a text")
        curves: dict[str, dict[int, dict[str, Curve]]] = {}
        for kind, by_ranks in part.items():
            if kind not in FUSED_KINDS or not isinstance(by_ranks, dict):
                raise self.bad(f"fused.{kind}", by_ranks, f"curves of {', '.join(FUSED_KINDS)} by number of ranks")
            for ranks, forms in by_ranks.items():
                name = f"fused.{kind}.{ranks}"
                if not (ranks.isascii() and ranks.isdigit()) or int(ranks) < 2:
                    raise self.bad(name, ranks, "a number of ranks from 2 on, as text")
                if not isinstance(forms, dict) or not set(forms) <= set(FORMS):
                    raise self.bad(name, forms, f"curves by form: {', '.join(FORMS)}")
                found = {form: self.curve(points, f"{name}.{form}") for form, points in forms.items()}
                curves.setdefault(kind, {})[int(ranks)] = found
        return FusedTimes(source, curves)

    def checks(self) -> tuple[tuple[str, int, str, int, int, int, str, float], ...]:
        found = self.found.get("checks") or []
        if not isinstance(found, list):
            raise self.bad("checks", found, "a list of [kind, ranks, dtype, M, N, K, strategy, microseconds]")
        for number, row in enumerate(found):
            texts = [row[i] for i in (0, 2, 6)] if isinstance(row, list) and len(row) == 8 else []
            numbers = [row[i] for i in (1, 3, 4, 5, 7)] if texts else []
            if not texts or not all(isinstance(x, str) for x in texts) or not all(_is_number(x) and x > 0 for x in numbers):
                raise self.bad(f"checks[{number}]", row, "[kind, ranks, dtype, M, N, K, strategy, microseconds]")
        return tuple((kind, int(r), t, int(m), int(n), int(k), how, float(us)) for kind, r, t, m, n, k, how, us in found)

    def bad(self, name: str, got: Any, expected: str) -> OptionError:
        text = repr(got)
        return _broken(self.where, name, text if len(text) <= 80 else text[:77] + "...", expected)


def rising(points: Any) -> Curve:
    """Return points whose time never falls with size: noise must not make more bytes cheaper."""
    out: list[tuple[float, float]] = []
    for size, us in points:
        out.append((size, max(us, out[-1][1]) if out else us))
    return tuple(out)


def _is_number(x: Any) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e15  # not NaN either


def _broken(where: str, name: str, got: str, expected: str, fix: str = _AGAIN) -> OptionError:
    return StoredFileError(what=f"bad profile: field {name!r}", where=where, got=got, expected=expected, fix=fix)
