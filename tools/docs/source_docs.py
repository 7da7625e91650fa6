"""Read documentation from Python sources: docstrings of fields, of enum members and of functions."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any


def one_line(text: str) -> str:
    """Return `text` with every run of white space as one space."""
    return " ".join(text.split())


def first_paragraph(value: Any) -> str:
    """Return the first paragraph of an object's own docstring in one line, "" without a docstring."""
    return one_line((inspect.getdoc(value) or "").split("\n\n")[0])


def member_docs(cls: type) -> dict[str, str]:
    """Return the string literal below each assignment of a class body, by the assigned name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        name = assigned_name(statement)
        if name and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[name] = one_line(str(following.value.value))
    return docs


def assigned_name(statement: ast.stmt) -> str:
    """Return the name that a statement assigns, "" if it assigns none or several."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def signature(value: Any) -> str:
    """Return the parameters and the result of a function as its source has them, without `self`."""
    whole = inspect.signature(value)
    parameters = [p for name, p in whole.parameters.items() if name != "self"]
    shown = str(whole.replace(parameters=parameters))
    shown = re.sub(r"(: |-> )(['\"])(.*?)\2(?= =|,|\)|$)", r"\1\3", shown)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", shown)  # classes by name: the paths of some are private
