"""The form of a site with packed operands (match/pack_groups.py): predicted under pack="auto", the widest under "force"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..cost.choice import StrategyChoice, margin_us
from ..match.pack_groups import PackedSite, explain_unpacked, one_matmul, packed_forms
from ..match.site import Site
from ..overrides.requested_strategy import Override
from ..plan.strategy import Mode, Strategy
from .profitability import SiteCosts


@dataclass(frozen=True, slots=True)
class PackedChoice:
    """A site in its chosen form, the choice of its strategy, and why its matmuls are packed or apart ("": nothing to pack).

    `most_us`: as in StrategyChoice, of all forms.
    """

    site: Site
    choice: StrategyChoice | None
    reason: str = ""
    most_us: float = math.inf


def choose_form(
    site: Site, costs: SiteCosts, override: Override | None, forms: Sequence[PackedSite] | None = None
) -> PackedChoice:
    """Return `site`, or a packed form of it. `override`: what the user requests. `forms`: its packed forms, where known."""
    forced, chunks = (override.strategy, override.chunks) if override else (None, 0)
    choice = None if forced else costs.choose(site, chunks)
    forms = packed_forms(site, costs.neighbors) if forms is None else forms
    if not forms:
        return PackedChoice(site, choice, explain_unpacked(site), choice.most_us if choice else math.inf)
    pack = costs.policy.pack
    if pack == "off":
        return PackedChoice(site, choice, "not packed: pack='off'")
    if forced and forced.direct and (whole := one_matmul(forms)):
        return PackedChoice(whole, None, f"packed as {_sizes(whole)}: direct stores the product of one matmul")
    if override and override.packs is not None:
        form = next((form for form in forms if form.packs == override.packs), site)
        return PackedChoice(
            form, choice, f"packed as {_sizes(form)} by request" if form is not site else "not packed by request"
        )
    if pack == "force":
        packed = None if forced else costs.choose(forms[0], chunks)
        return PackedChoice(forms[0], packed, f"packed as {_sizes(forms[0])}: pack='force'")
    requested = forced or Strategy(Mode.PIPELINED, chunks)
    times = costs.times_us(site, choice, requested)
    if times is None:
        return PackedChoice(site, choice)
    margin = margin_us(times.us, times.plain)
    best, best_us, texts = PackedChoice(site, choice), times.us - margin, []
    most_us = choice.most_us if choice else math.inf
    for form in forms:
        packed = None if forced else costs.choose(form, chunks)
        packed_times = costs.times_us(form, packed, requested)
        if packed_times is None:
            continue
        texts.append(f"{_sizes(form)} {packed_times.us:.0f}")
        most_us = max(most_us, packed.most_us if packed else math.inf)
        if packed_times.us < best_us:
            best, best_us = PackedChoice(form, packed), packed_times.us
    text = f"predicted us: apart {times.us:.0f}, packed as {', '.join(texts)}"
    chosen = f"packed as {_sizes(best.site)}" if best.site is not site else f"not packed: saves less than {margin:.0f} us"
    return PackedChoice(best.site, best.choice, f"{chosen}; {text}", most_us)


def _sizes(site: Site) -> str:
    """The numbers of matmuls that become one, e.g. "3+1"."""
    return "+".join(map(str, getattr(site, "packs", ())))
