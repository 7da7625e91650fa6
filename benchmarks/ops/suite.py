"""Suites: JSON lists of rows {kind, name, M, N, K}, sizes of the whole problem; float8 rows have "fp8": "tensor" or "row"."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "suites"
KEYS = {"kind", "name", "M", "N", "K"}
SCALINGS = ("", "tensor", "row")


@dataclass(frozen=True)
class SuiteRow:
    """AG: gathered [M, K] @ [K, N / ranks]. RS: [M, K / ranks] @ [K / ranks, N], summed and scattered to [M / ranks, N].

    fp8: operands are float8 with one scale per tensor or per row (right operand: per column); "": not float8.
    """

    kind: str
    name: str
    M: int
    N: int
    K: int
    fp8: str = ""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} {self.M}"

    def why_not(self, ranks: int) -> str:
        """Return the reason why `ranks` cannot share this row, "" if they can."""
        shared = {"M": self.M, "N": self.N} if self.kind == "AG" else {"M": self.M, "K": self.K}
        uneven = [f"{key} {size}" for key, size in shared.items() if size % ranks]
        return f"{', '.join(uneven)} cannot be shared by {ranks} ranks" if uneven else ""

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return m, n, k of one rank's matmul."""
        return (self.M, self.N // ranks, self.K) if self.kind == "AG" else (self.M, self.N, self.K // ranks)

    def shard_bytes(self, ranks: int) -> int:
        """Return the bytes a rank sends to each peer.

        AG: its shard (float8: one byte per element, and scales). RS: the peer's block of the product, two bytes per element."""
        if self.kind == "RS":
            return 2 * (self.M // ranks) * self.N
        return (self.M // ranks) * (2 * self.K if not self.fp8 else self.K + (4 if self.fp8 == "row" else 0))


def load(suite: str, pattern: str = "*") -> list[SuiteRow]:
    """Return rows of a suite (a path, or a name in benchmarks/suites) whose title matches. ValueError for a bad suite."""
    path = Path(suite) if Path(suite).exists() else FOLDER / f"{Path(suite).stem}.json"
    if not path.exists():
        raise ValueError(f"no suite {suite}: expected a file, or one of {sorted(p.stem for p in FOLDER.glob('*.json'))}")
    rows = []
    for number, entry in enumerate(json.loads(path.read_text())):
        sizes = [entry.get(key) for key in ("M", "N", "K")]
        known = set(entry) - {"fp8"} == KEYS and entry["kind"] in ("AG", "RS") and entry.get("fp8", "") in SCALINGS
        if not known or not all(isinstance(s, int) and s > 0 for s in sizes):
            expected = "expected kind AG or RS, name, M, N, K above 0, and fp8 'tensor' or 'row' or none"
            raise ValueError(f"{path}: row {number} is {entry}: {expected}")
        rows.append(SuiteRow(**entry))
    matching = [row for row in rows if any(fnmatchcase(row.title, p) for p in pattern.split(","))]
    if not matching:
        raise ValueError(f"--rows {pattern} matches none of {len(rows)} rows, such as {rows[0].title!r}")
    return matching
