"""What Dynamo knows of a call that it is tracing (`_torch_compat.py` names the private parts)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ub_overlap import _torch_compat


def tracing_backend() -> Any:
    """Return the backend of the compilation that is being traced, None outside of one."""
    try:
        return _torch_compat.InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, RuntimeError):
        return None


def traced_locals() -> Mapping[str, Any]:
    """Return the locals, as Dynamo's variables, of the innermost Python frame that Dynamo traces. RuntimeError without one."""
    frame = sys._getframe(1)
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, _torch_compat.InstructionTranslatorBase):
            return {name: _realized(v) for name, v in translator.symbolic_locals.items()}
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("no frame is being traced by Dynamo")


def _realized(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def module_of(variable: Any) -> Any:
    """Return the module that a variable of Dynamo stands for."""
    return variable.value


def items_of(variable: Any) -> list[Any]:
    """Return the variables in a tuple."""
    return [_realized(v) for v in variable.items]


def tensor_of(variable: Any) -> Any:
    """Return the fake tensor that a variable of Dynamo stands for."""
    return variable.as_proxy().node.meta["example_value"]


def hints_of(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes with the values of symbolic ones that decisions use. ValueError if one has none."""
    known = [s if isinstance(s, int) else _torch_compat.hint_of(s) for s in sizes]
    values = tuple(value for value in known if value is not None)
    if len(values) < len(known):
        raise ValueError(f"sizes {list(sizes)} have no values while they are traced")
    return values


def source_of(variable: Any) -> str:
    """Return where the program has the object of a variable, "L['self'].layers[0].mlp"; "" if it is not known."""
    return _name_of(getattr(variable, "source", None))


def input_source(node: Any) -> str:
    """Return where the program has an input of Dynamo's graph, "L['self']._modules['w1']._parameters['weight']", else ""."""
    return _name_of(getattr(node, "_dynamo_source", None))


def _name_of(source: Any) -> str:
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method in some releases
