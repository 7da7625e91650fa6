"""Exchanges through a Store: messages, missing ranks at the deadline, plan mismatches. Ranks are threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ub_overlap import _torch_compat
from ub_overlap.runtime import autotune, errors, settings
from ub_overlap.runtime.session import plan_announcements, plan_check, plan_graphs, plan_mismatch, session, store_exchange


@pytest.fixture
def short() -> Iterator[None]:
    before = settings.current()
    settings.configure(init_timeout_s=0.5, step_timeout_s=0.25)
    yield
    settings.configure(init_timeout_s=before.init_timeout_s, step_timeout_s=before.step_timeout_s)


def at_once(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Run all bodies concurrently and return the result or error of each."""
    found: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            found[rank] = bodies[rank]()
        except Exception as error:  # noqa: BLE001  (reported to the test)
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def members(store: Any, ranks: int) -> list[store_exchange.Exchange]:
    return [store_exchange.Exchange(store, "g", "cpu", rank, ranks, "op", "site") for rank in range(ranks)]


@pytest.mark.parametrize(("deadline", "setting"), [("init", "INIT"), ("step", "STEP")])
def test_an_error_names_the_setting_that_was_used(short: None, deadline: store_exchange.Deadline, setting: str) -> None:
    """The error names the setting of the deadline that was used, for any topic."""
    one, _ = members(dist.HashStore(), 2)
    with pytest.raises(errors.PeerTimeoutError) as caught:
        one.gather("tune/1", {}, deadline, "tune a site")
    assert f"within {store_exchange.deadline_seconds(deadline):g} s" in caught.value.what
    seconds = store_exchange.deadline_seconds(deadline)
    assert f"raise {setting.lower()}_timeout_s where ub_overlap.configure(...) sets it, to {seconds:g}" in caught.value.fix
    assert (caught.value.ranks, caught.value.phase, caught.value.op, caught.value.site) == ((1,), "tune/1", "op", "site")


def test_timing_a_site_waits_for_a_step(short: None) -> None:
    tuner = autotune.Tuner(members(dist.HashStore(), 2)[0], "cpu")
    with pytest.raises(errors.PeerTimeoutError, match="raise step_timeout_s where"):
        tuner.tune("op", "/site", 0, "work", ["pipelined", "none"], lambda _: True, lambda: None)


def test_a_rank_reads_one_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five ranks with three plans, two send their plan. Each rank reads the plan of the first rank that differs."""
    digests, store = ["aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "cccccccc", "bbbbbbbb"], dist.HashStore()
    looked: list[tuple[str, str]] = []
    for module in (plan_check, plan_mismatch):
        monkeypatch.setattr(module, "load_plan_text", lambda digest: json.dumps({"shared": {"sites": [{"id": digest}]}}))
    monkeypatch.setattr(plan_graphs, "pack_graphs", lambda digest: f"graphs of {digest}")
    monkeypatch.setattr(
        plan_graphs, "explain_difference", lambda mine, theirs, names: looked.append((mine, theirs)) or f"{mine}, {theirs}"
    )
    core = SimpleNamespace(device="cpu", group="g")
    ranks = [session.Session(core, one, None) for one in members(store, 5)]
    found = at_once([lambda r=r, d=d: r.verify(d, "op", f"{d}/0") for r, d in zip(ranks, digests, strict=True)])
    for rank, (error, mine) in enumerate(zip(found, digests, strict=True)):
        assert isinstance(error, errors.PlanMismatchError), error
        other = [r for r, theirs in enumerate(digests) if theirs != mine]
        assert error.ranks == tuple(other)
        assert f"rank {other[0]}: site id={digests[other[0]]}" in str(error) and f"rank {rank}: site id={mine}" in str(error)
        assert error.diff == f"graphs of {mine}, graphs of {digests[other[0]]}" and str(error).endswith(error.diff)
    assert len(looked) == 5
    assert [store.check([f"ub_overlap/cpu/1/text/1/{rank}"]) for rank in range(5)] == [True, False, True, False, False]


class Group:
    """The part of a process group that plan announcements use."""

    def __init__(self, rank: int) -> None:
        self.rank, self.store, self.group_name = lambda: rank, dist.HashStore(), "g"


def left(group: Group, graph: str) -> dict[str, Any]:
    key = plan_announcements._key("g", graph, 1)
    assert group.store.check([key]), "nothing was announced"  # get() would wait for five minutes
    return dict(json.loads(group.store.get(key)))


def test_announcements_end_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements of an earlier group of the same name are ignored. The list has a maximum length."""
    here = [Group(1)]
    monkeypatch.setattr(_torch_compat, "is_fake_group", lambda name: False)
    monkeypatch.setattr(_torch_compat, "group_of", lambda name: here[0])
    monkeypatch.setattr(_torch_compat, "store_of", lambda group: group.store)
    for digest in ("aa", "bb", "aa"):
        plan_announcements.announce_plan(["g"], "graph", digest)
    assert (left(here[0], "graph")["digests"], left(here[0], "graph")["digest"]) == (["bb", "aa"], "aa")
    here[0] = Group(1)
    plan_announcements.announce_plan(["g"], "graph", "cc")
    assert left(here[0], "graph")["digests"] == ["cc"] and not left(here[0], "graph")["dropped"]
    assert len(plan_announcements._announced) == 1, "the old group's went with it"
    for number in range(plan_announcements.MAX_PLANS):
        plan_announcements.announce_plan(["g"], "graph", f"{number:02}")
    assert left(here[0], "graph")["digests"] == [f"{number:02}" for number in range(plan_announcements.MAX_PLANS)]
    assert (
        left(here[0], "graph")["dropped"]
        and len(plan_announcements._announced[here[0]]["graph"]) == plan_announcements.MAX_PLANS + 1
    )
    plan_announcements.announce_plan(["g"], "graph", "dd")
    assert (
        left(here[0], "graph")["dropped"]
        and len(plan_announcements._announced[here[0]]["graph"]) == plan_announcements.MAX_PLANS + 1
    )


@pytest.mark.parametrize("dropped", [False, True])
def test_an_announcement_that_dropped_plans_is_no_evidence(dropped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = json.dumps({"graph": "G", "shared": {"sites": []}})
    for module in (plan_announcements, plan_mismatch):
        monkeypatch.setattr(module, "load_plan_text", lambda digest: plan)
    store = dist.HashStore()
    one = members(store, 2)[0]
    announcement = {"digests": ["bbbbbbbb"], "dropped": dropped, "digest": "bbbbbbbb", "site": "none of this plan"}
    store.set(plan_announcements._key("g", "G", 1), json.dumps(announcement))
    late = errors.PeerTimeoutError("late", ranks=(1,), phase="plan/1")
    found = plan_announcements.explain_timeout(one, "plan/1", "aaaaaaaa", late)
    assert (found is late) if dropped else isinstance(found, errors.PlanMismatchError) and found.ranks == (1,)


def test_picks_are_of_this_version_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return autotune._key("work", ["a", "b"], "cpu", 2)

    mine, before = key(), settings.current().replay
    assert key() == mine
    try:
        settings.configure(replay=not before)
        assert key() != mine
    finally:
        settings.configure(replay=before)
    monkeypatch.setattr(autotune, "extension", lambda: SimpleNamespace(build_info=lambda: {"version": "another"}))
    assert key() != mine


def test_the_rank_that_noticed_is_not_at_fault() -> None:
    """A peer's failure is handed on as it is, but to the rank at fault; an error of a rank's own names that rank."""
    noticed = errors.PeerTimeoutError("rank 2 of the group is gone", ranks=(2,), is_gone=True, fix="look at its log")
    told = json.loads(json.dumps(errors.to_peers(noticed, 0)))
    found = errors.from_peers(told, 1, "op", "/site")
    assert (type(found), found.ranks, found.what, found.fix) == (errors.PeerTimeoutError, (2,), noticed.what, noticed.fix)
    blamed = errors.from_peers(told, 2, "op", "/site")
    assert (type(blamed), blamed.ranks, blamed.got) == (errors.PeerFailedError, (0,), f"PeerTimeoutError: {noticed}")
    own = errors.from_peers(errors.to_peers(ValueError("no"), 0), 1, "op", "/site")
    assert (type(own), own.ranks, own.got) == (errors.PeerFailedError, (0,), "ValueError: no")
    record = errors.failure_record(noticed)
    assert record is not None and (record["culprit"], record["code"]) == (2, "peer_died")
    assert errors.failure_record(ValueError("no")) is None
