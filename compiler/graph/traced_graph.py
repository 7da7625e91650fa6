"""Graphs that the user has traced: whether the passes can read them, and the values of their nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.site_id import SiteId

from .aten import aten

PLAN = "ub_overlap_plan"
"""Key of GraphModule.meta: the digest of the plan of a graph that was rewritten, "" without one."""

_UNDECOMPOSED = {aten.linear.default, aten.matmul.default, aten.einsum.default}
"""Matmuls above autograd: in graphs of torch.export before its decompositions, or of make_fx(pre_dispatch=True)."""
_TRACE = "trace it by torch.fx.experimental.proxy_tensor.make_fx, or use torch.compile(model, backend='ub_overlap')"


def check_traced_graph(gm: GraphModule, inputs: Sequence[Any], where: str) -> None:
    """Raise OptionError if `gm` is no graph of ATen ops that takes `inputs`, or was rewritten before."""
    if not isinstance(gm, GraphModule):
        raise OptionError(
            what="not an FX graph",
            where=where,
            got=type(gm).__name__,
            expected="a torch.fx.GraphModule of ATen ops",
            fix=_TRACE,
        )
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise OptionError(
            what="other inputs than those of the graph",
            where=where,
            got=f"{len(inputs)} example inputs",
            expected=f"{len(placeholders)}: {', '.join(n.name for n in placeholders[:8])}{', ...' if placeholders[8:] else ''}",
            fix="pass the flat inputs of the graph, one for each placeholder",
        )
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, torch.Tensor) and compat.is_wrapper_subclass(value):
            raise OptionError(
                what="an example input is no plain tensor",
                where=f"{where}: input {node.name}",
                got=type(value).__name__,
                expected="the local tensor that the traced graph takes",
                fix="unwrap the inputs as the tracer does",
            )
    planned = next(filter(is_planned, gm.graph.nodes), None)
    if PLAN in gm.meta or planned is not None:
        raise OptionError(
            what="the graph was rewritten before",
            where=where,
            got=f"{planned.name}: {planned.target}" if planned is not None else "a graph without sites to rewrite",
            fix="pass the graph as traced; its plan is in ub_overlap.reports()",
        )
    for node in gm.graph.nodes:
        if (why := _refusal(node)) is not None:
            raise OptionError(
                what=f"not a graph of ATen ops: {why}",
                where=f"{where}: node {node.name}",
                got=f"{node.op} {node.target}",
                expected="ATen ops and torch.ops._c10d_functional collectives, below autograd",
                fix=_TRACE,
            )


def _refusal(node: Node) -> str | None:
    """Return why the passes cannot read `node`, or None."""
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    if node.op != "call_function":
        return "it calls modules or methods, as a graph of Dynamo or of symbolic_trace does"
    target = node.target
    if target in _UNDECOMPOSED or getattr(target, "namespace", "") in ("_c10d_functional_autograd", "c10d_functional"):
        return "it was traced above autograd, where ops are not decomposed yet"
    if isinstance(target, compat.OpOverload | compat.HigherOrderOperator) or target is operator.getitem:
        return None
    is_of_tensors = any(isinstance(_value(n), torch.Tensor) for n in node.all_input_nodes)
    is_arithmetic = getattr(target, "__module__", "") in ("_operator", "math") or target is round or "sym_" in str(target)
    return None if is_arithmetic and not is_of_tensors else "it calls functions of Python, as a graph of Dynamo does"


def _value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def is_planned(node: Node) -> bool:
    """Return whether `node` is an op of a site that a plan has placed in this graph. Functions of the user have no plan."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "ub_overlap":
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    site = given.get("site")
    return isinstance(site, str) and SiteId.parse(site).digest != ""


def hoist_attributes(graph: Graph) -> None:
    """Move the nodes that read attributes, such as parameters that a closure held, in front of all that computes."""
    first = next((n for n in graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    if first is None:
        return
    for node in graph.find_nodes(op="get_attr"):
        first.prepend(node)


def compute_values(gm: GraphModule, inputs: Sequence[Any], where: str) -> None:
    """Give all nodes `meta["val"]` of one fake mode, unless they have it. `inputs`: real or fake.

    make_fx gives each value a mode of its own where it traces real tensors.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    nodes = [*(n for n in gm.graph.nodes if n.op in ("placeholder", "call_function")), *_tensor_attributes(gm)]
    if all("val" in n.meta for n in nodes) and len(_modes(n.meta["val"] for n in nodes)) <= 1:
        return
    values = [n.meta.get("val") for n in placeholders]
    if all("val" in n.meta for n in placeholders) and len(_modes(values)) == 1:
        inputs = values
    modes = _modes(inputs)
    mode = modes[0] if modes else compat.FakeTensorMode()
    fake = [mode.from_tensor(x, static_shapes=True) if _is_real(x) else x for x in inputs]
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True  # attributes are real
    try:
        with torch.no_grad():
            FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fake)
    except Exception as error:
        raise OptionError(
            what="the values of the graph cannot be computed from the example inputs",
            where=where,
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="pass inputs of the sizes that the graph was traced with",
        ) from error
    finally:
        mode.allow_non_fake_inputs = before


def _modes(values: Iterable[Any]) -> list[Any]:
    """Return the fake modes of the tensors among `values`, each once."""
    tensors = [x for x in compat.tree_leaves(list(values)) if isinstance(x, torch.Tensor) and not _is_real(x)]
    return list({id(mode): mode for mode in map(compat.fake_mode_of, tensors)}.values())


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and compat.detect_fake_mode([x]) is None


def _tensor_attributes(gm: GraphModule) -> list[Node]:
    """Return the nodes that read tensors of the module; others read subgraphs."""
    return [n for n in gm.graph.find_nodes(op="get_attr") if isinstance(attribute_of(n), torch.Tensor)]


def attribute_of(node: Node) -> Any:
    """Return what a get_attr node reads; None where the module lacks it."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value
