"""What a decision is predicted to take: the cost model asked about a site of a plan, for reports and for planning ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..cost.choice import choose
from ..cost.predict import Prediction, predict
from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..plan.decision import Decision
from ..plan.strategy import NONE


@dataclass(frozen=True, slots=True)
class Outlook:
    """Microseconds of one site. `by_strategy`: predictions of all that could run it, none first, and of what was decided.

    `exposed_us`: what the communication adds to the matmuls alone, as decided; `gain_us`: against none."""

    FIELDS: ClassVar[tuple[str, ...]] = (
        "matmul_us", "communication_us", "predicted_us", "choice", "best", "gain_us", "choice_reason",
    )  # fmt: skip

    by_strategy: dict[str, Prediction]
    decided: str
    best: str
    reason: str

    @property
    def none(self) -> Prediction:
        return self.by_strategy[str(NONE)]

    @property
    def chosen(self) -> Prediction:
        return self.by_strategy[self.decided]

    @property
    def gain_us(self) -> float:
        return self.none.us - self.chosen.us

    @property
    def exposed_us(self) -> float:
        return max(0.0, self.chosen.us - self.chosen.matmul_us)

    def to_dict(self) -> dict[str, Any]:
        return {
            "matmul_us": round(self.none.matmul_us, 3),
            "communication_us": round(self.none.communication_us, 3),
            "predicted_us": {s: round(p.us, 3) for s, p in self.by_strategy.items()},
            "choice": self.decided,
            "best": self.best,
            "gain_us": round(self.gain_us, 3),
            "choice_reason": self.reason,
        }

    def times(self) -> str:
        """ "none 615, pipelined 432, ..."."""
        return ", ".join(f"{s} {p.us:.0f}" for s, p in self.by_strategy.items())


def shape_of(d: Decision) -> SiteShape | None:
    """The site as the cost model knows it; None for what it has no model of (other collectives, other dtypes, groups of one
    rank, sizes without a value, what was merged away)."""
    return None if d.work is None else SiteShape.from_dict(d.work.to_dict())


def outlook(d: Decision, profile: Profile) -> Outlook | None:
    """Predictions for one decision, or None as for `shape_of`."""
    shape = shape_of(d)
    if shape is None:
        return None
    decided = str(d.traced)
    if not shape.matmuls:
        alone = predict(shape, NONE, profile)
        return Outlook({str(NONE): alone}, str(NONE), str(NONE), "nothing to hide it behind")
    choice = choose(shape, profile)
    known = dict(choice.predictions)
    if decided not in known:
        known[decided] = predict(shape, d.traced, profile)
    return Outlook(known, decided, str(choice.strategy), choice.reason)


@dataclass(frozen=True, slots=True)
class Totals:
    """Microseconds over many sites; `matmul_us` is what no overlap can save."""

    sites: int
    unknown: int
    """Sites without a prediction."""
    matmul_us: float
    communication_us: float
    none_us: float
    chosen_us: float

    @property
    def exposed_us(self) -> float:
        """What communication adds without overlap."""
        return max(0.0, self.none_us - self.matmul_us)

    @property
    def hidden(self) -> float:
        """Share of the exposed communication that the choice hides."""
        return (self.none_us - self.chosen_us) / self.exposed_us if self.exposed_us else 0.0

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__}
        own |= {"exposed_us": self.exposed_us, "hidden": self.hidden}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in own.items()}

    def __str__(self) -> str:
        text = (
            f"{self.sites} sites: matmuls {self.matmul_us:.0f} us, communication {self.communication_us:.0f} us; predicted "
            f"{self.none_us:.0f} us without overlap, {self.chosen_us:.0f} us as decided"
        )
        if self.exposed_us:
            text += f": {self.hidden:.0%} of {self.exposed_us:.0f} us exposed communication hidden"
        return text + (f"; {self.unknown} more without a prediction" if self.unknown else "")


def totals(outlooks: Sequence[Outlook | None]) -> Totals:
    """Sums over those that are known."""
    known = [o for o in outlooks if o is not None]
    return Totals(
        sites=len(known),
        unknown=len(outlooks) - len(known),
        matmul_us=sum(o.none.matmul_us for o in known),
        communication_us=sum(o.none.communication_us for o in known),
        none_us=sum(o.none.us for o in known),
        chosen_us=sum(o.chosen.us for o in known),
    )
