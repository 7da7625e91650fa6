"""What the plan records of the places of split collectives: windows, predictions and the order of all that communicates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..cost.choice import StrategyChoice
from ..cost.predict import Prediction
from ..match import Candidate, Miss
from ..match.all_to_all import finishes_together
from ..match.collectives import Op
from ..match.fusion_order import FusionOrder
from ..plan.decision import SplitWindow
from ..plan.reasons import Reason
from ..plan.strategy import NONE
from ..select.assignment import Assignment
from .placement import Placed
from .split_candidates import SplitCandidate

Places = tuple[Placed, ...]
"""The places of one collective: one, or those of its two halves in order."""


def saved_us(places: Places) -> float:
    """Return what a collective saves at its places."""
    return sum(p.saved_us for p in places)


def share_of(member: SplitCandidate, s: SplitCandidate) -> float:
    """Return the share of a bucket's times that counts for one of its collectives; 1 where `s` is sent alone."""
    return member.times.plain_us / s.times.plain_us if s.bucket else 1.0


def describe_window(
    s: SplitCandidate, places: Places, numbers: Sequence[tuple[list[int], list[int]]], member: SplitCandidate
) -> SplitWindow:
    """Return the record of the places of one collective. `numbers`: as of number_ops, for each place.

    `member`: the collective, where `s` is a bucket; else `s`.
    """
    forms = s.halves or (s,)
    transports = [h.transport for h in s.halves] if s.halves else ["c10d" if s.window.collective.hosts > 1 else ""]
    window = None
    for form, transport, p, (shared, own) in zip(forms, transports, places, numbers, strict=True):
        (start_order, *finish_order), (starts, finishes, *releases) = shared, own
        window = SplitWindow(
            p.slot, start_order, starts, finishes, form.landing_bytes, round(form.times.transfer_us, 2),
            round(p.exposed_us, 2), transport, releases[0] if releases else None, finish_order[0] if finish_order else None,
            window,
        )  # fmt: skip
    assert window is not None
    if not s.bucket:
        return window
    transfer, exposed = (round(us * share_of(member, s), 2) for us in (window.transfer_us, window.exposed_us))
    return replace(window, landing_bytes=member.landing_bytes, transfer_us=transfer, exposed_us=exposed)


def explain_loss(s: SplitCandidate, best_us: float | None) -> Miss | None:
    """Return why splitting an all_to_all does not pay; None for other collectives, whose fused forms have their own reasons.

    `best_us`: what it saves at most, where that is too little.
    """
    if s.window.collective.op is not Op.ALL_TO_ALL:
        return None
    saves = "it would have to wait where it is placed" if best_us is None else f"split saves {max(0.0, best_us):.0f} us at most"
    text = f"predicted us: none {s.times.plain_us:.0f}, split {s.times.shortest_us:.0f} if all is hidden; {saves}"
    return Miss(Reason.NO_GAIN, _with_assumption(text, s))


def choice_of(s: SplitCandidate, places: Places, member: SplitCandidate) -> StrategyChoice:
    """Return the predictions of a placed collective: plain, and the time that it takes from the graph. `member`: as above."""
    share, plain_us = share_of(member, s), member.times.plain_us
    saved, exposed = saved_us(places) * share, sum(p.exposed_us for p in places) * share
    us, transfer = plain_us - saved, sum(form.times.transfer_us for form in s.halves or (s,)) * share
    plain = Prediction(plain_us, 0.0, plain_us)
    own = Prediction(us, 0.0, transfer)
    text = f"predicted us: none {plain.us:.0f}, {s.strategy} {us:.0f}, of which {exposed:.0f} waiting"
    predictions = {str(NONE): plain, str(s.strategy): own}
    return StrategyChoice(s.strategy, predictions, _with_assumption(text, s), saved, (NONE, s.strategy))


def _with_assumption(text: str, s: SplitCandidate) -> str:
    return "; ".join(filter(None, (text, s.times.assumed)))


def number_ops(
    candidates: Sequence[Candidate],
    assignments: Sequence[Assignment],
    order: FusionOrder,
    placed: Mapping[int, Places],
    joined: Collection[int],
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return for each placed collective, or half of one, two lists: the numbers of its ops among those whose order ranks share,
    and the numbers of all its ops among everything that communicates. Keys: the number of the candidate, and of the half.
    `joined`: candidates that are sent in the bucket of another one.

    Ranks share the order of starts, of whole collectives, and of finishes that wait for finishes of other ranks. Where a rank
    has its other finishes is its own business, and so is how many other nodes lie in between.
    """
    events: list[tuple[tuple[int, int, int], tuple[int, int]]] = []
    for i, (candidate, assignment) in enumerate(zip(candidates, assignments, strict=True)):
        for part, p in enumerate(placed.get(i, ())):
            events += [((p.start, 0, p.start_number), (i, part)), ((p.finish, 0, p.finish_number), (i, part))]
            if p.release is not None:
                events.append(((p.release, 0, p.release_number), (i, part)))
        if i not in placed and i not in joined:
            site = assignment.site
            node = candidate.collective.node
            events.append(((order.span(node)[0] if site else order.position[node], 1, i), (i, 0)))
    ordered: dict[tuple[int, int], list[int]] = {}
    numbers: dict[tuple[int, int], list[int]] = {}
    count = 0
    for number, (_, key) in enumerate(sorted(events)):
        own = numbers.setdefault(key, [])
        own.append(number)
        if len(own) == 1 or (len(own) == 2 and finishes_together(candidates[key[0]].collective)):
            ordered.setdefault(key, []).append(count)
            count += 1
    return {key: (ordered[key], own) for key, own in numbers.items() if key[0] in placed}
