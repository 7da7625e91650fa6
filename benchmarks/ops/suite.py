"""Suites: JSON lists of rows {kind, name, M, N, K}, sizes of the whole problem."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "suites"
KEYS = {"kind", "name", "M", "N", "K"}


@dataclass(frozen=True)
class Row:
    """AG: gathered [M, K] @ [K, N / ranks]. RS: [M, K / ranks] @ [K / ranks, N], summed and scattered to [M / ranks, N]."""

    kind: str
    name: str
    M: int
    N: int
    K: int

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} {self.M}"

    def why_not(self, ranks: int) -> str:
        """The reason why `ranks` cannot share this row, "" if they can."""
        shared = {"M": self.M, "N": self.N} if self.kind == "AG" else {"M": self.M, "K": self.K}
        uneven = [f"{key} {size}" for key, size in shared.items() if size % ranks]
        return f"{', '.join(uneven)} cannot be shared by {ranks} ranks" if uneven else ""

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """m, n, k of one rank's matmul."""
        return (self.M, self.N // ranks, self.K) if self.kind == "AG" else (self.M, self.N, self.K // ranks)

    def shard_bytes(self, ranks: int) -> int:
        """What a rank sends to each peer, in bytes of two-byte elements: its shard, or the peer's block of the product."""
        return 2 * (self.M // ranks) * (self.K if self.kind == "AG" else self.N)


def load(suite: str, pattern: str = "*") -> list[Row]:
    """Rows of a suite (a path, or a name in benchmarks/suites) whose title fits `pattern`. ValueError for a bad one."""
    path = Path(suite) if Path(suite).exists() else FOLDER / f"{Path(suite).stem}.json"
    if not path.exists():
        raise ValueError(f"no suite {suite}: expected a file, or one of {sorted(p.stem for p in FOLDER.glob('*.json'))}")
    rows = []
    for number, given in enumerate(json.loads(path.read_text())):
        sizes = [given.get(key) for key in ("M", "N", "K")]
        if set(given) != KEYS or given["kind"] not in ("AG", "RS") or not all(isinstance(s, int) and s > 0 for s in sizes):
            raise ValueError(f"{path}: row {number} is {given}: expected kind AG or RS, name, and M, N, K above 0")
        rows.append(Row(**given))
    found = [row for row in rows if any(fnmatchcase(row.title, p) for p in pattern.split(","))]
    if not found:
        raise ValueError(f"--rows {pattern} fits none of {len(rows)} rows, such as {rows[0].title!r}")
    return found
