"""Estimate the time of a graph's work outside of sites.

Matmuls outside of sites and grouped matmuls use the cost model. The profile has no attention kernel and no fusion, so these are
rough. Attention runs at a share of the matmul rate. Elementwise work (norms, activations, rotary positions, residuals) is fused
into kernels that read their inputs and write their outputs once, at memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ub_overlap.compiler.cost.attention_time import attention_us
from ub_overlap.compiler.cost.grouped_time import grouped_us
from ub_overlap.compiler.cost.matmul_time import matmul_us
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.graph.aten import CUTS, aten, element_effect, node_arg, shape_of
from ub_overlap.compiler.graph.attention import as_attention
from ub_overlap.compiler.graph.grouped_matmul import BATCH, as_grouped_matmul
from ub_overlap.compiler.graph.matmul import as_matmul, is_matmul
from ub_overlap.compiler.graph.sizes import numel
from ub_overlap.compiler.match.collectives import is_collective

_FREE = {aten.sym_size.int, torch.ops._c10d_functional.wait_tensor.default}


@dataclass(frozen=True, slots=True)
class UnmatchedWork:
    """Work outside of sites.

    `matmuls`: (dtype, M, N, K). `groups`: (dtype, groups, M, N, K, divided) of experts and batches, see grouped_us.
    `attention`: (dtype, operations, backward). `kernels`: bytes read and written by each.
    """

    matmuls: tuple[tuple[str, int, int, int], ...]
    groups: tuple[tuple[str, int, int, int, int, str], ...]
    attention: tuple[tuple[str, float, bool], ...]
    kernels: tuple[int, ...]

    def us(self, profile: Profile) -> dict[str, float]:
        """Return the microseconds by kind of work."""
        experts = [work for work in self.groups if work[-1] != BATCH]
        batches = [work for work in self.groups if work[-1] == BATCH]
        matmuls_us = sum(matmul_us(profile, dtype, "nt", m, n, k) for dtype, m, n, k in self.matmuls)
        times = {
            "experts": sum(grouped_us(profile, *work) for work in experts),
            "matmuls": matmuls_us + sum(grouped_us(profile, *work) for work in batches),
            "attention": sum(attention_us(profile, *work) for work in self.attention),
            "elementwise": sum(profile.compute.launch_us + b / (profile.compute.memory_gbs * 1e3) for b in self.kernels),
        }
        return {kind: us for kind, us in times.items() if experts or kind != "experts"}


def find_unmatched_work(graph: Graph, site_nodes: set[Node]) -> UnmatchedWork:
    """Return the work of `graph` outside of `site_nodes`. PlannedBlock must be static."""
    matmuls: list[tuple[str, int, int, int]] = []
    groups: list[tuple[str, int, int, int, int, str]] = []
    attention: list[tuple[str, float, bool]] = []
    light: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or node in site_nodes or node.target in _FREE or is_collective(node):
            continue
        if (p := as_matmul(node)) is not None:
            matmuls.append((_dtype(node), int(p.shape[0]), int(p.shape[1]), int(p.inner)))
        elif (g := as_grouped_matmul(node)) is not None:
            groups.append((g.dtype, int(g.groups), int(g.m), int(g.n), int(g.k), g.divided))
        elif is_matmul(node):
            left = shape_of(node_arg(node, 1 if node.target is aten.addmm.default else 0))
            matmuls.append((_dtype(node), int(numel(left[:-1])), int(shape_of(node)[-1]), int(left[-1])))
        elif (found := as_attention(node)) is not None:
            attention.append((str(found.dtype).removeprefix("torch."), found.operations * found.share, found.is_backward))
        else:
            light.append(node)
    return UnmatchedWork(tuple(matmuls), tuple(groups), tuple(attention), tuple(_kernels(light)))


def _dtype(node: Node) -> str:
    val = node.meta["val"]
    return str((val if isinstance(val, torch.Tensor) else val[0]).dtype).removeprefix("torch.")


def _kernels(light: list[Node]) -> list[int]:
    """Return the bytes of the kernels that elementwise nodes fuse into.

    One kernel: nodes that feed each other, also through views, with equally many matmuls, collectives and attentions before
    them. Nodes separated by such an op cannot be one kernel.
    """
    inside = set(light)
    works = [n for n in light if not _is_view(n)]
    depth: dict[Node, int] = {}
    for node in light[0].graph.nodes if light else []:
        depths = [depth[i] for i in node.all_input_nodes]
        depth[node] = max(depths, default=0) + (node.op == "call_function" and node not in inside)
    group = {n: n for n in works}

    def find(node: Node) -> Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    read: dict[Node, set[Node]] = {n: {_view_base(i, inside) for i in n.all_input_nodes} for n in works}
    for node in works:
        for before in read[node]:
            if before in group and depth[before] == depth[node]:
                group[find(node)] = find(before)
    reads: dict[Node, set[Node]] = {}
    writes: dict[Node, set[Node]] = {}
    for node in works:
        root = find(node)
        for before in read[node]:
            if before not in group or find(before) is not root:
                reads.setdefault(root, set()).add(before)
                if before in group:
                    writes.setdefault(find(before), set()).add(before)
        if any(u not in inside for u in _users(node, inside)):
            writes.setdefault(root, set()).add(node)
    roots = dict.fromkeys(find(n) for n in works)
    return [sum(map(_bytes, reads.get(r, set()) | writes.get(r, set()))) for r in roots]


def _view_base(node: Node, inside: set[Node]) -> Node:
    """Return the node whose memory `node` is a view of."""
    while node in inside and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: Node, inside: set[Node]) -> list[Node]:
    """Return the readers of `node`, also through views."""
    readers: list[Node] = []
    for user in node.users:
        readers += _users(user, inside) if user in inside and _is_view(user) else [user]
    return readers


def _is_view(node: Node) -> bool:
    """Return whether the node moves no bytes: another shape of the same elements, or a part of them."""
    if node.target in CUTS or "getitem" in str(node.target) or node.target is aten.slice.Tensor:
        return True
    step = element_effect(node)
    return (step is not None and node.target is not aten.clone.default) or node.target is aten.transpose.int


def _bytes(node: Node) -> int:
    val = node.meta.get("val")
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0
