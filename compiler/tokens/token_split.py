"""The choice for one tokenwise layer, with the times that it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Whether a layer is computed in two halves of its tokens."""

    sizes: tuple[int, ...]
    """Of the tokens."""
    dim: int
    """The dim that is cut; -1: the layer stays whole."""
    whole_us: float | None = None
    """Predicted microseconds of forward and backward; None where they were not compared."""
    halves_us: float | None = None
    reason: str = ""
    """Why times were not compared."""
    layer: str = ""

    def of(self, layer: str) -> TokenSplit:
        """Return the choice of another layer of the same structure."""
        return replace(self, layer=layer)

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        form = "whole" if self.dim < 0 else f"two halves along dim {self.dim}"
        times = f"predicted us: whole {self.whole_us:.0f}, halves {self.halves_us:.0f}" if self.whole_us is not None else ""
        tokens = "x".join(map(str, self.sizes))
        return f"{self.layer or 'layer'}: {form} of tokens [{tokens}]; {times or self.reason}"
