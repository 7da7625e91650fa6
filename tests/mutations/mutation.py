"""The record of one mutation: a small fault of the product, and the tests that must fail with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`name`: in kebab case. `file`: relative to the root of the repository."""

    name: str
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    fault: str
    """The fault in a few words."""
    tests: tuple[str, ...]
    """Files or ids of tests that notice it, the cheapest first."""
    note: str = ""
    """Of a survivor: why nothing notices it, and what would."""

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault. ValueError unless `old` occurs once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}, expected once")
        return text.replace(self.old, self.new)

    @property
    def is_cpp(self) -> bool:
        """Whether the extension has to be linked again."""
        return self.file.startswith("csrc/")
