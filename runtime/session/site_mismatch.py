"""The errors that C++ raises, with what the stored plans know about two ranks at different sites.

A batch of another size or dtype runs another compilation of the same graph, so its sites have other plan digests. To C++ that
looks like another place in the program. The plans of both compilations are stored, because all ranks have verified both.
"""

from __future__ import annotations

import re
from typing import Any

from .. import errors, settings
from ..site_id import SiteId
from .plan_mismatch import find_stored_site

_SITE = re.compile(r".* at site '([^']*)'$")


def make_error(name: str, fields: dict[str, str]) -> errors.UbOverlapError:
    """Return the error that C++ describes by class name and fields."""
    if name == "SiteMismatchError" and (error := _other_inputs(fields)):
        return error
    return errors.make(name, {**fields, "advice": settings.advise("step_timeout_s")})


def _other_inputs(fields: dict[str, str]) -> errors.ShapeMismatchError | None:
    """Return the error for ranks at one site of one graph that was compiled for different inputs, None elsewhere."""
    theirs, own = (_site_row(fields[side]) for side in ("got", "expected"))
    if theirs is None or own is None:
        return None
    (their_graph, their_row), (own_graph, own_row) = theirs, own
    keys = ("id", "kind", "module")
    if their_graph != own_graph or any(their_row.get(key) != own_row.get(key) for key in keys):
        return None
    theirs, own = _describe_inputs(their_row), _describe_inputs(own_row)
    if theirs == own:
        return None
    culprit, reporter = int(fields["ranks"]), int(fields["reporter"])
    module = f" of module '{own_row['module']}'" if own_row.get("module") else ""
    return errors.ShapeMismatchError(
        f"ranks {reporter} and {culprit} run one graph on different inputs",
        ranks=(culprit,),
        where=f"{fields['op']} at site '{fields['site']}'{module}",
        got=f"rank {culprit}: {theirs}",
        expected=f"rank {reporter}: {own}",
        fix="give all ranks of a group the same batch size, sequence length and dtype; look at the last batch of an epoch",
    )


def _site_row(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (graph, row of the site in its stored plan) for "<op> at site '<digest>/<id>'", None without such a plan."""
    match = _SITE.match(text)
    return find_stored_site(SiteId.parse(match[1])) if match else None


def _describe_inputs(row: dict[str, Any]) -> str:
    """Return "float32, input [32, 64], gathered [64, 64]"."""
    return ", ".join([row["dtype"], *(f"{name} {shape}" for name, shape in row["shapes"].items())])
