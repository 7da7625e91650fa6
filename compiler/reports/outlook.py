"""Predicted times of decisions, from the cost model, for reports and for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..cost.choice import choose
from ..cost.fused_choice import choose_fused
from ..cost.predict import Prediction, predict
from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..cost.split_time import SplitTimes, hierarchical_times, split_times
from ..plan.decision import Decision, SplitWindow
from ..plan.strategy import NONE
from ..text.table import Abbreviated
from ..text.times import format_times


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted times of one site, in microseconds.

    `by_strategy`: the predictions of all strategies that could run it, none first, and of the decided one.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "matmul_us", "communication_us", "predicted_us", "choice", "best", "gain_us", "choice_reason",
    )  # fmt: skip

    by_strategy: dict[str, Prediction]
    decided: str
    best: str
    reason: str

    @property
    def none(self) -> Prediction:
        """The prediction without overlap."""
        return self.by_strategy[str(NONE)]

    @property
    def chosen(self) -> Prediction:
        """The prediction of the decided strategy."""
        return self.by_strategy[self.decided]

    @property
    def gain_us(self) -> float:
        """The predicted saving against no overlap."""
        return self.none.us - self.chosen.us

    @property
    def exposed_us(self) -> float:
        """The exposed communication time as decided: the time beyond that of the matmuls alone."""
        return max(0.0, self.chosen.us - self.chosen.matmul_us)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of FIELDS."""
        return {
            "matmul_us": round(self.none.matmul_us, 3),
            "communication_us": round(self.none.communication_us, 3),
            "predicted_us": {s: round(p.us, 3) for s, p in self.by_strategy.items()},
            "choice": self.decided,
            "best": self.best,
            "gain_us": round(self.gain_us, 3),
            "choice_reason": self.reason,
        }

    def times(self) -> Abbreviated:
        """Return the predictions as text: "none 615, pipelined 432, ...", in short "615 -> 432"."""
        return format_times({s: p.us for s, p in self.by_strategy.items()}, self.decided)


def site_shape_of(d: Decision) -> SiteShape | None:
    """Return the site as the cost model reads it, or None.

    None for other collectives, other dtypes, groups of one rank, sizes without a value, and merged collectives.
    """
    return None if d.work is None else SiteShape.from_dict(d.work.to_dict())


def outlook(d: Decision, profile: Profile) -> Outlook | None:
    """Return the predictions for one decision, or None as for `site_shape_of`."""
    shape = site_shape_of(d)
    if shape is None:
        return None
    decided = str(d.traced)
    if not shape.matmuls:
        alone = predict(shape, NONE, profile)
        if d.window is not None:
            split = _predict_split(d, d.window, shape, profile)
            return Outlook({str(NONE): alone, decided: split}, decided, decided, str(d.window))
        if d.traced.is_fused or shape.is_fused:
            return _predict_fused(d, shape, profile)
        return Outlook({str(NONE): alone}, str(NONE), str(NONE), "no matmul to hide it behind")
    choice = choose(shape, profile)
    predictions = dict(choice.predictions)
    if decided not in predictions:
        predictions[decided] = predict(shape, d.traced, profile)
    return Outlook(predictions, decided, str(choice.strategy), choice.reason)


def _predict_fused(d: Decision, shape: SiteShape, profile: Profile) -> Outlook | None:
    """Return the predictions for a collective of few tokens; None where its strategy was requested and never measured."""
    choice = choose_fused(shape, profile)
    if choice is None or str(d.traced) not in choice.predictions:
        return None
    return Outlook(dict(choice.predictions), str(d.traced), str(choice.strategy), choice.reason)


def _times_of(d: Decision, window: SplitWindow, shape: SiteShape, profile: Profile) -> tuple[SplitTimes, ...]:
    """Return the times of a split collective, or of the halves of a hierarchical one."""
    if window.first_half is not None:
        return hierarchical_times(shape, d.traced.chunks, profile)
    return (split_times(shape, d.traced.chunks, profile, window.releases is not None),)


def _predict_split(d: Decision, window: SplitWindow, shape: SiteShape, profile: Profile) -> Prediction:
    """Return the time that a split collective takes from the graph: its ops, its waits, and what its transfers slow down.

    Of a collective in a bucket its share, as it was decided: the sizes of the others are in decisions of their own.
    """
    if window.bucket:
        return Prediction(dict(d.predicted)[str(d.traced)], 0.0, window.transfer_us)
    times = _times_of(d, window, shape, profile)
    exposed = sum(half.exposed_us for half in window.halves)
    return Prediction(exposed + sum(t.shortest_us + t.slowed_us for t in times), 0.0, sum(t.transfer_us for t in times))


@dataclass(frozen=True, slots=True)
class Totals:
    """Predicted times of many sites together, in microseconds. No overlap can save `matmul_us`."""

    sites: int
    unknown: int
    """Sites without a prediction."""
    matmul_us: float
    communication_us: float
    none_us: float
    chosen_us: float

    @property
    def exposed_us(self) -> float:
        """The exposed communication time without overlap."""
        return max(0.0, self.none_us - self.matmul_us)

    @property
    def hidden(self) -> float:
        """The share of the exposed communication that the decisions hide."""
        return (self.none_us - self.chosen_us) / self.exposed_us if self.exposed_us else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        own = {name: getattr(self, name) for name in self.__slots__}
        own |= {"exposed_us": self.exposed_us, "hidden": self.hidden}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in own.items()}

    def __str__(self) -> str:
        text = (
            f"{self.sites} sites: matmuls {self.matmul_us:.0f} us, communication {self.communication_us:.0f} us; predicted "
            f"{self.none_us:.0f} us without overlap, {self.chosen_us:.0f} us as decided"
        )
        if self.exposed_us and self.chosen_us > self.none_us:
            text += f": predicted to take {self.chosen_us - self.none_us:.0f} us longer"
        elif self.exposed_us:
            text += f": predicted to hide {self.hidden:.0%} of {self.exposed_us:.0f} us exposed communication"
        return text + (f"; {self.unknown} more without a prediction" if self.unknown else "")


def totals(outlooks: Sequence[Outlook | None]) -> Totals:
    """Return the sums over the sites that have predictions."""
    known = [o for o in outlooks if o is not None]
    return Totals(
        sites=len(known),
        unknown=len(outlooks) - len(known),
        matmul_us=sum(o.none.matmul_us for o in known),
        communication_us=sum(o.none.communication_us for o in known),
        none_us=sum(o.none.us for o in known),
        chosen_us=sum(o.chosen.us for o in known),
    )
