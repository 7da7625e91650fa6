"""The pages of reasons and errors, from the docstrings of enum members and of classes."""

from __future__ import annotations

import inspect

from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.runtime import errors
from ub_overlap.runtime.typed_fields import markdown_table

from .source_docs import first_paragraph, member_docs, one_line, signature


def reasons_page() -> str:
    """Return the page of kinds of sites and of reasons."""
    docs, kinds = member_docs(Reason), member_docs(Kind)
    # The anchors are for the links of a report's page.
    reasons = [(f'<a id="{reason.value}"></a>`{reason.value}`', docs[reason.name]) for reason in Reason]
    sites = [(f"`{kind.value}`", kinds.get(kind.name, "")) for kind in Kind]
    return f"""# Reasons

A collective without a strategy has a reason: `decision.reason`, in reports and logs. `decision.detail` has the values.

{markdown_table(("reason", "meaning"), reasons)}

## Kinds of sites

{markdown_table(("kind", "meaning"), sites)}
"""


def errors_page() -> str:
    """Return the page of error classes."""
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.UbOverlapError) and value.__module__ == errors.__name__
    ]
    parts = []
    for cls in sorted(classes, key=lambda cls: (len(cls.__mro__), cls.__name__)):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        paragraphs = [one_line(text) for text in (inspect.getdoc(cls) or "").split("\n\n")]
        parts.append(f"## {cls.__name__}\n\nBase: {bases}.\n\n" + "\n\n".join(paragraphs))
    intro = f"{first_paragraph(errors)} All are in `ub_overlap.errors`. Constructor: `{signature(errors.UbOverlapError)}`."
    return "\n\n".join(["# Errors", intro, *parts]) + "\n"
