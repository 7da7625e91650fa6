"""Tests of the search for algorithms of matmuls: choice, files, loading. No GPU: tests/gpu has the search itself."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from tests.harness.ranks import PATIENCE_S
from ub_overlap.runtime import autotune
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.matmul_algorithms import gpu, loading, search, store, tuning
from ub_overlap.runtime.matmul_algorithms.search import Problem
from ub_overlap.runtime.matmul_algorithms.store import ChosenAlgorithm, Library

LIBRARY = Library("NVIDIA H200", 130100)
A, B, C = (bytes([n]) * 64 for n in (1, 2, 3))
KEY, OTHER = "8192,1024,-1,0", "4096,512,1,0"
CHOSEN = ChosenAlgorithm(B, "1024 x 7168 x 8192 bfloat16", 160.0, 190.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    loading.forget()
    yield tmp_path
    loading.forget()


@dataclass
class FakeDevice:
    """Algorithms with given times. `missing`: keys whose buffers cannot be allocated."""

    us: dict[bytes, float]
    missing: frozenset[str] = frozenset()
    calls: list[bytes] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=lambda: {KEY: 1, OTHER: 1})
    at_peers: frozenset[str] = frozenset()

    def problems(self) -> list[Problem]:
        return [Problem(key, f"matmul {key}", uses, key in self.at_peers) for key, uses in self.uses.items()]

    def propose(self, key: str, count: int) -> list[bytes]:
        return list(self.us)[:count]

    def time_call(self, call: Callable[[], object]) -> float:
        """The time of the algorithm that is in use, for a matmul that stores at peers."""
        call()
        (key,) = self.at_peers
        self.calls.append(extension().matmul_algorithms(0)[key])
        return self.us[self.calls[-1]]

    def prepare(self, problem: Problem, algorithms: Sequence[bytes]) -> Callable[[int], float]:
        if problem.key in self.missing:
            raise MemoryError("no memory")

        def run(index: int) -> float:
            self.calls.append(algorithms[index])
            return self.us[algorithms[index]]

        return run


def times(**us: float) -> list[list[Any]]:
    return [[{"a": A, "b": B, "c": C}[name].hex(), value] for name, value in us.items()]


def chosen(*ranks: search.Times) -> dict[str, bytes]:
    return {key: row.algorithm for key, row in search.choose(ranks, {}).items()}


def test_the_fastest_of_the_slowest_ranks_wins() -> None:
    assert chosen({KEY: times(a=100, b=90, c=80)}) == {KEY: C}
    assert chosen({KEY: times(a=100, b=90, c=80)}, {KEY: times(a=100, b=91, c=95)}) == {KEY: B}
    row = search.choose([{KEY: times(a=100, b=90)}, {KEY: times(a=102, b=91)}], {KEY: "text"})[KEY]
    assert (row.us, row.first_us, row.text) == (91, 102, "text")


def test_small_gains_are_noise() -> None:
    assert chosen({KEY: times(a=100, b=98.5)}) == {KEY: A}
    assert chosen({KEY: times(a=100, b=97.5)}) == {KEY: B}


def test_only_algorithms_that_all_ranks_timed_count() -> None:
    assert chosen({KEY: times(a=100, b=50)}, {KEY: times(a=100, c=50)}) == {KEY: A}
    assert chosen({KEY: times(a=100)}, {KEY: []}) == {}
    # A rank whose shape differs has no say.
    assert chosen({KEY: times(a=100, b=50)}, {OTHER: times(a=100, b=99)}) == {KEY: B, OTHER: A}


def test_a_search_alternates_and_drops_what_must_not_be_used() -> None:
    device = FakeDevice({A: 10.0, B: math.inf, C: 5.0})
    found = search.search(device, device.problems()[:1], (), lambda own: [json.loads(json.dumps(own))])
    assert found[KEY].algorithm == C and found[KEY].first_us == 10.0 and found[KEY].text == f"matmul {KEY}"
    assert device.calls[:6] == [A, B, C, A, B, C] and len(device.calls) == 3 * (search.WARM + search.TIMED)


def test_a_rank_without_memory_keeps_the_first_proposals(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [FakeDevice({A: 10.0, B: 5.0}), FakeDevice({A: 10.0, B: 5.0}, frozenset({KEY}))]
    own = [search.measure(device, device.problems()) for device in ranks]
    assert {key: row.algorithm for key, row in search.choose(own, {}).items()} == {OTHER: B}
    assert "no memory" in caplog.text


def test_at_most_sixteen_proposals_are_timed() -> None:
    device = FakeDevice({bytes([n]) * 64: 20.0 - n for n in range(20)})
    assert len(search.measure(device, device.problems()[:1])[KEY]) == search.PROPOSALS == 16


def test_matmuls_of_a_call_are_searched_once_and_then_in_use(cache: Path) -> None:
    device = FakeDevice({A: 10.0, B: 5.0})

    def call() -> None:
        device.uses[OTHER] += 1

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own]

    generation = tuning.tune_call(device, 0, LIBRARY, call, gather, write=True)
    assert list(generation) == [OTHER] and extension().matmul_algorithms(0) == {OTHER: B}
    assert store.load(LIBRARY)[OTHER].algorithm == B
    calls = len(device.calls)
    assert tuning.tune_call(device, 0, LIBRARY, call, gather, write=True) == {} and len(device.calls) == calls


def test_a_matmul_that_stores_at_peers_is_timed_in_its_call(cache: Path) -> None:
    """Not by itself: the links decide. The slowest rank decides here too."""
    device = FakeDevice({A: 10.0, B: 5.0, C: 6.0}, missing=frozenset({KEY}), at_peers=frozenset({KEY}))

    def call() -> None:
        device.uses[KEY] += 1

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        peer = dict(own)
        if "us" in own:
            peer |= {"key": OTHER, "us": [own["us"][0], 3 * own["us"][1], own["us"][2]]}
        return [own, peer]

    found = tuning.tune_call(device, 0, LIBRARY, call, gather, write=True)
    assert extension().matmul_algorithms(0) == {KEY: C, OTHER: C}
    assert found[KEY].us == 6.0 and found[KEY].first_us == 10.0 and set(store.load(LIBRARY)) == {KEY, OTHER}
    assert device.calls[:4] == [A, B, C, A] and len(device.calls) == 3 * (search.WARM + search.TIMED)
    assert tuning.tune_call(device, 0, LIBRARY, call, gather, write=True) == {}


def test_ranks_with_other_proposals_keep_the_first_at_peers(cache: Path) -> None:
    device = FakeDevice({A: 10.0, B: 5.0}, at_peers=frozenset({KEY}))

    def call() -> None:
        device.uses[KEY] += 1

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own, {**own, "proposals": []}] if "proposals" in own else [own, own]

    assert tuning.tune_call(device, 0, LIBRARY, call, gather, write=True) == {} and device.calls == []
    assert extension().matmul_algorithms(0) == {}


@pytest.mark.tier("test")
def test_a_second_process_uses_what_is_stored(cache: Path) -> None:
    store.add(LIBRARY, {KEY: CHOSEN})
    program = (
        "from ub_overlap.runtime.extension import extension\n"
        "from ub_overlap.runtime.matmul_algorithms import loading, store\n"
        f"digest = loading.load(0, store.{LIBRARY!r})\n"
        "print(digest, extension().matmul_algorithms(0), extension().matmul_algorithms(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip().endswith(f"{ {KEY: B} } {{}}")
    assert done.stdout.split()[0] == loading.load(0, LIBRARY) != ""


def test_files_of_other_libraries_are_not_used(cache: Path) -> None:
    store.add(LIBRARY, {KEY: CHOSEN})
    assert store.load(LIBRARY) == {KEY: CHOSEN}
    for other in (Library("NVIDIA H200", 130200), Library("NVIDIA H100", 130100)):
        assert store.load(other) == {}
        store.path_of(other).write_bytes(store.path_of(LIBRARY).read_bytes())  # copied there by hand
        assert store.load(other) == {}


def test_a_later_search_keeps_what_is_stored(cache: Path) -> None:
    store.add(LIBRARY, {KEY: CHOSEN})
    store.add(LIBRARY, {OTHER: CHOSEN})
    assert set(store.load(LIBRARY)) == {KEY, OTHER}


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"version": 1}',
        '{"version": 2, "gpu": "NVIDIA H200", "library": 130100, "algorithms": {}}',
        *(
            json.dumps({"version": 1, "gpu": "NVIDIA H200", "library": 130100, "algorithms": rows})
            for rows in (
                [], {"x": {}}, {KEY: 1}, {KEY: {"algorithm": "zz", "text": "", "us": 1, "first_us": 1}},
                {KEY: {"algorithm": "00" * 500, "text": "", "us": 1, "first_us": 1}},
                {KEY: {"algorithm": "00", "text": 1, "us": 1, "first_us": 1}},
                {KEY: {"algorithm": "00", "text": "", "us": "fast", "first_us": 1}},
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(content: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store.path_of(LIBRARY)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert store.load(LIBRARY) == {} and str(path) in caplog.text
    store.add(LIBRARY, {KEY: CHOSEN})
    assert store.load(LIBRARY) == {KEY: CHOSEN}


def test_ranks_that_read_different_files_use_none(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.add(LIBRARY, {KEY: CHOSEN})
    assert loading.load(0, LIBRARY) and extension().matmul_algorithms(0)
    with caplog.at_level(logging.WARNING):
        loading.drop(0, "tp")
    assert extension().matmul_algorithms(0) == {} and "group 'tp'" in caplog.text
    assert loading.load(0, LIBRARY) == ""  # also for groups that are bound later


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_folder() -> Path:
        raise FileNotFoundError(2, "no home folder", "~/.cache")

    monkeypatch.setattr(store.plan_store, "directory", no_folder)
    assert store.load(LIBRARY) == {}
    store.add(LIBRARY, {KEY: CHOSEN})
    assert "no home folder" in caplog.text


def test_autotune_searches_the_chosen_strategy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TunedGpu(FakeDevice):
        device = 0

        def library(self) -> Library:
            return LIBRARY

    class OneRank:
        rank, topics = 0, list[str]()

        def gather(self, topic: str, own: Any, *_: Any) -> list[Any]:
            self.topics.append(topic)
            return [own]

    device, exchange = TunedGpu({A: 10.0, B: 5.0}), OneRank()
    monkeypatch.setattr(gpu, "MatmulGpu", lambda: device)

    def call() -> None:
        device.uses[KEY] += 1

    autotune.Tuner(cast("Any", exchange), "cuda")._tune_matmuls(call, lambda: None)
    assert exchange.topics == ["algorithms-0/0", "algorithms-1/0"]
    assert extension().matmul_algorithms(0) == {KEY: B} and set(store.load(LIBRARY)) == {KEY}
