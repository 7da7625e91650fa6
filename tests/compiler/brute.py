"""Brute-force optimum for a graph's collectives, without the search of compiler/select."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import networkx
from torch.fx import Graph, Node

from ub_overlap.compiler.cost.choice import choose
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.site_sizes import shape_of_site
from ub_overlap.compiler.graph.aten import is_mutable
from ub_overlap.compiler.graph.matmul import Matmul, as_matmul, is_matmul
from ub_overlap.compiler.match import Bulk, Candidate, Gather, Site, find_candidates
from ub_overlap.compiler.select.independent_sets import fitting_independent
from ub_overlap.compiler.select.legality import without


def gain(site: Site, profile: Profile) -> float:
    """Return the microseconds that the best strategy saves at this site."""
    shape = shape_of_site(site, {})
    assert shape is not None
    return choose(shape, profile).gain_us


def edges(graph: Graph) -> list[tuple[Node, Node]]:
    return [(i, n) for n in graph.nodes for i in n.all_input_nodes]


def legal(graph: Graph, groups: list[list[Node]]) -> bool:
    """Return whether each group can be fused into one op, all at once.

    Groups are disjoint and form no cycle. No write lies between members, and no matmul reads another one of its group.
    """
    whole: dict[Node, Node] = {}
    for group in groups:
        if any(is_matmul(n) and is_matmul(i) and i in group for n in group for i in n.all_input_nodes):
            return False
        for n in group:
            if n in whole:
                return False
            whole[n] = min(group)
    dag = networkx.DiGraph([(a, b) for i, n in edges(graph) if (a := whole.get(i, i)) is not (b := whole.get(n, n))])
    if not networkx.is_directed_acyclic_graph(dag):
        return False
    segment: dict[Node, int] = {}
    walls = 0
    for n in graph.nodes:
        walls += is_mutable(n)
        segment[n] = walls
    for group in groups:
        near = [i for n in group for i in n.all_input_nodes]
        if max(segment[n] for n in (*group, *near)) != min(segment[n] for n in group):
            return False
    return True


def independent(graph: Graph, node: Node) -> list[Matmul]:
    """Return the matmuls without a path to or from `node`."""
    dag = networkx.DiGraph(edges(graph))
    tied = networkx.ancestors(dag, node) | networkx.descendants(dag, node)
    products = [as_matmul(n) for n in graph.nodes if is_matmul(n) and n not in tied]
    return [p for p in products if p is not None]


def sites(graph: Graph, candidate: Candidate) -> Iterator[Site]:
    """Yield every site that could contain this collective, legal or not."""
    match = candidate.match
    if isinstance(match, Gather):
        nodes = [k.compute.node for k in match.consumers]
        for count in range(len(nodes)):
            for gone in combinations(nodes, count):
                yield without(match, set(gone))
    elif match is not None:
        yield match
    if match is not None:
        fitting = fitting_independent(match, candidate.independent_matmuls)
        for count in range(1, len(fitting) + 1):
            yield from (replace(match, independent=some) for some in combinations(fitting, count))
    if candidate.collective.wait is not None:
        products = independent(graph, candidate.collective.node)
        for count in range(1, len(products) + 1):
            for some in combinations(products, count):
                nodes = {p.node for p in some}
                if not any(i in nodes for n in nodes for i in n.all_input_nodes):
                    yield Bulk(candidate.collective, some)


def best(graph: Graph, profile: Profile) -> float:
    """Return the maximum saving in microseconds."""
    choices: list[list[tuple[float, list[Node]]]] = []
    for candidate in find_candidates(graph):
        found = [(gain(site, profile), site.members) for site in sites(graph, candidate)]
        choices.append([(us, members) for us, members in sorted(found, key=lambda x: -x[0]) if us > 0])
    most = 0.0

    def search(at: int, worth: float, groups: list[list[Node]]) -> None:
        nonlocal most
        most = max(most, worth)
        if worth + sum(c[0][0] for c in choices[at:] if c) <= most:
            return
        for us, members in choices[at]:
            if legal(graph, [*groups, members]):
                search(at + 1, worth + us, [*groups, members])
        search(at + 1, worth, groups)

    search(0, 0.0, [])
    return most
