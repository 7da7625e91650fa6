"""Transport selection on fake machine descriptions: the transport and the reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap import _torch_compat
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.session import symm_mem, transport
from ub_overlap.runtime.session.topology import Gpu, Topology, TransportChoice, build_topology, choose_transport

from . import rank_initialize

HOPPER, AMPERE, VOLTA = ("NVIDIA H200", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)), ("Tesla V100-SXM2-32GB", (7, 0))


def matrix(ranks: int, value: bool | None = True) -> tuple[tuple[bool | None, ...], ...]:
    return tuple(tuple(True if i == j else value for j in range(ranks)) for i in range(ranks))


def box(ranks: int, kind: tuple[str, tuple[int, int]] = HOPPER, **changes: Any) -> Topology:
    """Return one host with a GPU per rank, all connected by NVLink."""
    gpus = tuple(Gpu(uuid=f"uuid{r}", name=kind[0], capability=kind[1]) for r in range(ranks))
    whole = Topology(hosts=("h:boot:1",) * ranks, gpus=gpus, peer=matrix(ranks), nvlink=matrix(ranks))
    return dataclasses.replace(whole, **changes)


def without(ranks: int, *pairs: tuple[int, int]) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple((i, j) not in pairs for j in range(ranks)) for i in range(ranks))


@pytest.mark.parametrize("kind", [HOPPER, AMPERE, VOLTA])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_nvlink_peers_of_any_generation(ranks: int, kind: tuple[str, tuple[int, int]]) -> None:
    assert choose_transport(box(ranks, kind)) == TransportChoice(transport="symmetric memory")


def test_cpu_ranks() -> None:
    assert choose_transport(Topology(hosts=("h:1",) * 3)) == TransportChoice(transport="shared memory")
    found = choose_transport(Topology(hosts=("b:1", "a:1", "b:1")))
    assert found == TransportChoice(transport="c10d", reason="its ranks do not share memory (2 hosts: a, b)")


def test_hosts_come_first() -> None:
    """Several hosts are the reported reason, even if GPUs share a uuid (partitions) or have no matrix entry."""
    found = choose_transport(box(2, hosts=("node1:x", "node2:y"), peer=matrix(2, None), nvlink=matrix(2, None)))
    assert found.transport == "c10d"
    assert found.reason == "its ranks do not share memory (2 hosts: node1, node2)"


def test_two_boots_of_one_name_are_two_hosts() -> None:
    assert (
        choose_transport(box(2, hosts=("node:boot1", "node:boot2"))).reason == "its ranks do not share memory (2 hosts: node)"
    )


def test_two_ranks_on_one_gpu() -> None:
    gpus = (*box(3).gpus, box(3).gpus[1])
    found = choose_transport(box(4, gpus=gpus))
    assert found.transport == "c10d"
    assert "ranks 1 and 3 are on one GPU (uuid1)" in found.reason
    assert choose_transport(box(4, gpus=gpus, shared_gpus=True)) == TransportChoice(transport="symmetric memory")
    assert choose_transport(box(4, gpus=gpus, shared_gpus=True, peer=without(4, (0, 1)))).transport == "c10d"


@pytest.mark.parametrize("other", [("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA H200", (10, 0))])
def test_gpus_of_two_models(other: tuple[str, tuple[int, int]]) -> None:
    """Kernels of two ranks must be launched alike, which each rank decides by its own GPU."""
    gpus = (*box(2).gpus, *box(3, other).gpus[2:])
    found = choose_transport(box(3, gpus=gpus))
    assert found.transport == "c10d"
    assert found.reason == (
        "the GPUs of its ranks 0 and 2 differ (NVIDIA H200, compute capability 9.0; "
        f"{other[0]}, compute capability {other[1][0]}.{other[1][1]})"
    )
    accepted = choose_transport(box(3, gpus=gpus, any_link=True, shared_gpus=True))
    assert accepted.reason == found.reason, "no setting accepts it"


def test_no_peer_access() -> None:
    found = choose_transport(box(4, peer=without(4, (2, 0), (2, 3))))
    assert found == TransportChoice(transport="c10d", reason="the GPU of its rank 2 has no peer access to that of ranks 0, 3")


def test_pcie_only() -> None:
    """Two NVLink islands connected by PCIe, as in machines with bridges, are slow peers."""
    islands = without(4, *((i, j) for i in range(4) for j in range(4) if i // 2 != j // 2))
    found = choose_transport(box(4, AMPERE, nvlink=islands))
    assert found.transport == "c10d"
    assert "rank 0 reaches that of ranks 2, 3 over PCIe only, not over NVLink" in found.reason
    assert "UB_OVERLAP_LINKS=any" in found.reason
    assert choose_transport(box(2, AMPERE)).transport == "symmetric memory"
    assert choose_transport(box(4, AMPERE, nvlink=islands, any_link=True)).transport == "symmetric memory"
    assert choose_transport(box(4, AMPERE, peer=without(4, (0, 1)), any_link=True)).transport == "c10d"


def test_what_is_unknown_counts_as_good_and_is_told() -> None:
    nvlink = ((True, None, True), (True, True, True), (True, True, True))
    assert choose_transport(box(3, nvlink=nvlink)) == TransportChoice(transport="symmetric memory", unknown=((0, 1),))
    assert choose_transport(box(2, peer=matrix(2, None))).unknown == ((0, 1),)
    assert choose_transport(box(2, nvlink=matrix(2, None))).unknown == ((0, 1),)


def test_described_from_what_ranks_exchange() -> None:
    """Descriptions pass through JSON as in the exchange. PCIe and shared GPUs are accepted only if all ranks accept them."""
    cards = [{"host": "h:1", "gpu": {"uuid": f"u{r}", "name": "X", "capability": [8, 6]}} for r in range(2)]
    rows: list[dict[str, Any]] = [
        {"peer": [True, True], "nvlink": [True, False], "any": True, "shared_gpus": True},
        {"peer": [True, True], "nvlink": [None, True], "any": False, "shared_gpus": False},
    ]
    found = build_topology(*json.loads(json.dumps([cards, rows])))
    assert found == Topology(
        hosts=("h:1", "h:1"),
        gpus=(Gpu(uuid="u0", name="X", capability=(8, 6)), Gpu(uuid="u1", name="X", capability=(8, 6))),
        peer=((True, True), (True, True)),
        nvlink=((True, False), (None, True)),
    )
    assert choose_transport(found).transport == "c10d"
    rows[1]["any"] = True
    assert choose_transport(build_topology(cards, rows)).transport == "symmetric memory"
    cards[1]["gpu"] = cards[0]["gpu"]
    assert choose_transport(build_topology(cards, rows)).transport == "c10d"
    rows[1]["shared_gpus"] = True
    assert choose_transport(build_topology(cards, rows)).transport == "symmetric memory"


class Properties:
    name, major, minor = "NVIDIA Fake", 9, 0

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


@pytest.mark.parametrize(
    ("by_torch", "by_nvml", "expected"),
    [
        ([[0, 18], [18, 0]], None, True),
        ([[0, 0], [0, 0]], True, True),  # switches that are hidden from a virtual machine
        ([[0, 0], [0, 0]], False, False),
        ([[0, 0], [0, 0]], None, None),
        (None, False, False),
        (None, None, None),
    ],
)
def test_links_as_one_rank_sees_them(
    monkeypatch: pytest.MonkeyPatch, by_torch: list[list[int]] | None, by_nvml: bool | None, expected: bool | None
) -> None:
    """A rank reports links to visible devices only. Rank 1 of 3 sees rank 0's device, not rank 2's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties(f"u{i}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (1, 0))
    monkeypatch.setattr(_torch_compat, "nvlinks", lambda: by_torch)
    monkeypatch.setattr(symm_mem._Nvml, "has_nvlink", lambda self, a, b: by_nvml if {a, b} == {"u0", "u1"} else None)
    assert symm_mem.find_links(["u0", "u1", "hidden"], 1) == {"peer": [True, True, None], "nvlink": [expected, True, None]}
    assert symm_mem.describe_gpu() == {"uuid": "u1", "name": "NVIDIA Fake", "capability": [9, 0]}


class Library:
    """A fake of the used part of NVML. `status`: of the pair. `known`: the uuids it has."""

    def __init__(self, status: int, known: tuple[bytes, ...] = (b"GPU-a", b"GPU-b")) -> None:
        self.status, self.known = status, known

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name in self.known else 6

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: Any, status: Any) -> int:
        assert index.value == 2
        status._obj.value = self.status
        return 0


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False), (5, False), (6, None), (-1, None)])
def test_what_nvml_says_of_a_pair(status: int, expected: bool | None) -> None:
    nvml = symm_mem._Nvml()
    nvml._library = Library(status)
    assert nvml.has_nvlink("a", "GPU-b") is expected
    assert nvml.has_nvlink("a", "c") is None
    nvml._library = None
    assert nvml.has_nvlink("a", "b") is None
    nvml._library = object()  # a library without these functions
    assert nvml.has_nvlink("a", "b") is None


def test_torch_without_gpus_cannot_tell() -> None:
    if not torch.cuda.is_available():
        assert _torch_compat.nvlinks() is None


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_OVERLAP_LINKS", "any")
    assert settings.from_environment().links == "any"
    monkeypatch.setenv("UB_OVERLAP_LINKS", "")
    assert settings.from_environment().links == "nvlink"
    monkeypatch.setenv("UB_OVERLAP_LINKS", "fast")
    with pytest.raises(OptionError, match="links"):
        settings.from_environment()


@pytest.mark.parametrize(
    ("nvlink", "any_link"),
    full_but([(True, True), (False, False), (None, False)], itertools.product([True, False, None], [False, True])),
)
def test_a_group_bound_on_faked_gpus(pools: dict[int, RankPool], nvlink: bool | None, any_link: bool) -> None:
    for rank, found in enumerate(pools[2].run(rank_initialize.gpus, nvlink, any_link)):
        line = found["lines"][-1]
        assert f"on cuda:{rank} (Fake): rank {rank} of 2, transport {found['transport']}" in line
        assert found["error"] is None
        if nvlink is False and not any_link:
            assert (found["transport"], found["slot"]) == ("c10d", 0)
            assert "over PCIe only" in found["reason"]
            assert found["reason"] in line
        else:
            assert (found["transport"], found["slot"], found["reason"]) == ("symmetric memory", 1 << 20, "")
            assert "1048576 bytes per slot, 2097152 bytes of arena" in line
        unknown = [text for text in found["lines"] if "links between ranks 0 and 1 are unknown" in text]
        assert len(unknown) == (nvlink is None)


def test_a_group_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose type is not c10d's, such as torchft's, are left alone with a reason."""

    class ManagedProcessGroup:
        pass

    monkeypatch.setattr(_torch_compat, "group_of", lambda name: ManagedProcessGroup())
    monkeypatch.setattr(_torch_compat, "is_fake_group", lambda name: False)
    reason = transport.unsupported_reason("cpu", "managed", 2)
    assert reason is not None
    assert "ManagedProcessGroup: its ranks may change between calls" in reason
