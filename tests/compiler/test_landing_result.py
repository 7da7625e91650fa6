"""Gathers whose result may stay in landing memory, look-alikes that are copied, and the places of releases in graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from tests.compiler.dags import Dag, aten
from ub_overlap.compiler.match.collectives import find_collectives
from ub_overlap.compiler.match.fusion_order import FusionOrder
from ub_overlap.compiler.match.window import WindowFinder
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.landing_result import find_readers, release_position

prims = torch.ops.prims


def readers_of_first(d: Dag, *outputs: Node) -> tuple[list[str] | None, int | None]:
    """Return the readers of the first gather by name, and the position of its release."""
    graph = d.output(*outputs)
    order = FusionOrder(graph)
    window = WindowFinder(graph).find(next(iter(find_collectives(graph))))
    widening = [n for c in find_collectives(graph) if c.widening for n in c.widening.nodes]
    found = find_readers(window, widening)
    return (None, None) if found is None else ([n.name for n in found], release_position(window, found, order, {}))


def test_a_weight_is_released_behind_its_last_matmul() -> None:
    """Through views, and from several matmuls."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    gathered = d.gather(w)
    first = d.mm(x, d.t(gathered))
    second = d.mm(d.call(aten.relu.default, first), d.call(aten.view.default, gathered, [64, 64]))
    more = d.call(aten.relu.default, second)
    names, position = readers_of_first(d, more)
    assert names is not None and {first.name, second.name} < set(names)
    assert position is not None and list(d.graph.nodes)[position] is more


def test_a_cast_that_is_stored_is_a_reader() -> None:
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    cast = d.call(prims.convert_element_type.default, d.gather(w), torch.float16)
    product = d.mm(d.call(prims.convert_element_type.default, x, torch.float16), cast)
    names, position = readers_of_first(d, product)
    assert names == [cast.name] and position is not None
    assert list(d.graph.nodes)[position] is product.all_input_nodes[0], "the cast moves with the finish; the release follows it"


@pytest.mark.parametrize("copied", ["repeated", "cast"])
def test_a_copy_behind_the_first_reader_is_one(copied: str) -> None:
    """A weight is copied once for each of two products. The second copy stays where it is, and the release follows it."""
    d = Dag()
    x, gathered = d.input("x", 64, 64), d.gather(d.input("primals_1", 32, 64))

    def product() -> tuple[Node, Node]:
        if copied == "cast":
            copy = d.call(prims.convert_element_type.default, gathered, torch.float16)
            return copy, d.mm(d.call(prims.convert_element_type.default, x, torch.float16), copy)
        heads = d.call(aten.expand.default, d.call(aten.view.default, gathered, [1, 64, 64]), [2, 64, 64])
        copy = d.call(aten.clone.default, heads)
        return copy, d.mm(x, d.t(d.call(aten.view.default, copy, [128, 64])))

    _, first = product()
    between = d.mm(x, x)
    late, second = product()
    _, position = readers_of_first(d, first, between, second)
    assert position is not None and FusionOrder(d.graph).items[position - 1] is late


def saved(d: Dag, gathered: Node) -> Node:
    return gathered


def saved_view(d: Dag, gathered: Node) -> Node:
    return d.t(d.call(aten.view.default, gathered, [64, 64]))


def saved_part(d: Dag, gathered: Node) -> Node:
    return d.call(operator.getitem, d.call(aten.split.Tensor, gathered, 32), 1)


def written(d: Dag, gathered: Node) -> Node:
    return d.call(aten.add_.Tensor, gathered, 1.0)


def written_view(d: Dag, gathered: Node) -> Node:
    return d.call(aten.mul_.Tensor, d.t(gathered), 2.0)


def sent(d: Dag, gathered: Node) -> Node:
    return d.scatter(gathered)


def sent_wide(d: Dag, gathered: Node) -> Node:
    """A site sends the gathered bf16 tensor, not the cast."""
    return d.scatter(d.call(prims.convert_element_type.default, gathered, torch.float32))


def fused(d: Dag, gathered: Node) -> Node:
    """Inductor computes the first product in the kernel of the second."""
    return d.call(aten.mul.Tensor, d.call(aten.mul.Tensor, gathered, 2.0), gathered)


@pytest.mark.parametrize("use", [saved, saved_view, saved_part, written, written_view, sent, sent_wide, fused])
def test_look_alikes_are_copied(use: Callable[[Dag, Node], Node]) -> None:
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    gathered = d.gather(w)
    product = d.mm(x, gathered)
    assert readers_of_first(d, product, use(d, gathered)) == (None, None)


def layers(saves: bool, count: int = 4) -> Dag:
    """Return small products with gathered weights, and large ones that hide the gathers. `saves`: the graph returns the
    weights."""
    d = Dag(2)
    x, large, weight = d.input("x", 256, 4096), d.input("large", 4096, 4096), d.input("weight", 4096, 4096)
    shards = [d.input(f"primals_{i + 1}", *((2048, 14336) if i % 2 else (7168, 4096))) for i in range(count)]
    kept = []
    for shard in shards:
        large = d.mm(large, weight)
        kept.append(d.gather(shard))
        x = d.mm(x, d.t(kept[-1]))
    d.output(x, large, *(kept if saves else ()))
    return d


def plan(saves: bool, zero_copy: str) -> Plan:
    options = Options(profile="h200", min_bytes=0, independent_matmuls="off", coalesce="off", zero_copy=zero_copy)  # type: ignore[arg-type]
    return decide(layers(saves).graph, options, "forward", lambda *_: None).plan


def test_plans() -> None:
    """The option selects zero-copy gathers where no weight is saved. They save more, and ranks compare their releases."""
    copied, in_place, kept = plan(False, "off"), plan(False, "auto"), plan(True, "auto")
    assert all(d.window is None or d.window.releases is None for p in (copied, kept) for d in p.decisions)
    windows = [d.window for d in in_place.decisions if d.window is not None]
    assert len(windows) >= 3 and all(w.starts < w.finishes < (w.releases or 0) for w in windows)
    assert "not copied and released as number" in in_place.decisions[1].detail
    for before, after in zip(copied.decisions[1:], in_place.decisions[1:], strict=True):
        assert dict(after.predicted)["split"] < dict(before.predicted)["split"]
    assert [len(site["window"]) for site in in_place.shared["sites"] if site.get("window")] == [3] * len(windows)
    assert in_place.shared_digest not in (copied.shared_digest, kept.shared_digest)
    again = Plan.from_json(in_place.to_json())
    assert again.digest == in_place.digest and again.decisions == in_place.decisions
