"""Tests of profiles: round trips, profile lookup, and errors for invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cost.machine import PLAIN
from ub_overlap.compiler.cost import Profile, load
from ub_overlap.compiler.cost.matmul_time import analytic_us
from ub_overlap.compiler.cost.network import Network
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.profile_lookup import _of_this_machine, analytic, read, shipped, signature
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.plan.strategy import Strategy
from ub_overlap.runtime import machine, profile_store, stored_file
from ub_overlap.runtime.errors import OptionError
from ub_overlap.tools.calibrate.fit import compare_calls, fit, fit_rates, shape_of, with_steps

Json = dict[str, Any]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a cache directory that belongs to the test."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    _of_this_machine.cache_clear()
    read.cache_clear()
    yield tmp_path / "profiles"
    _of_this_machine.cache_clear()
    read.cache_clear()


NETWORK = {"source": "made up", "gbs": 1.0, "base_us": 1.0, "step_us": 1.0, "hop_us": 1.0, "matmul_slowdown": 0.0}


def test_round_trip() -> None:
    measured = Network("made up", 1.0, 1.0, 1.0, 1.0, 0.0, 0.1, {"all_gather": {(4, 2): ((1.0, 1.0),)}})
    for profile in (
        PLAIN,
        replace(PLAIN, network=measured),
        load("h200"),
        load("h100"),
        load("cpu"),
        analytic("a GPU", 100, (8, 0)),
    ):
        again = Profile.from_json(profile.to_json(), "here")
        assert again == profile and hash(again) == hash(profile)
        assert again.digest == profile.digest and again.to_json() == profile.to_json()


def test_a_network_of_an_older_file() -> None:
    """Profiles written before 2026-11-28 have no slowdown of transfers."""
    found = json.loads(PLAIN.to_json())
    network = Profile.from_json(json.dumps({**found, "network": NETWORK}), "here").network
    assert "transfer_slowdown" not in NETWORK and network is not None and network.transfer_slowdown == 0


def test_shipped_profiles_say_where_they_come_from() -> None:
    assert shipped() == ["cpu", "h100", "h200"]
    for name in shipped():
        profile = load(name)
        assert profile.name == name and "measured" in profile.source and profile.matmuls
        assert profile.key["device"] == ("cpu" if name == "cpu" else "cuda")


def drop(field: str) -> Callable[[Json], None]:
    def change(found: Json) -> None:
        *path, last = field.split(".")
        for name in path:
            found = found[name]
        del found[last]

    return change


def put(field: str, value: Any) -> Callable[[Json], None]:
    def change(found: Json) -> None:
        *path, last = field.split(".")
        here: Any = found
        for name in path:
            here = here[int(name) if isinstance(here, list) else name]
        here[int(last) if isinstance(here, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "field", "got", "expected"),
    [
        (drop("format"), "format", "None", "ub_overlap profile"),
        (put("version", 0), "version", "0", "1"),
        (put("version", 2), "version", "2", "1"),
        (drop("compute"), "compute", "None", "an object"),
        (put("compute.units", "many"), "compute.units", "'many'", "a number of at least 1"),
        (put("compute.units", 0), "compute.units", "0", "a number of at least 1"),
        (put("compute.tiles", []), "compute.tiles", "[]", "a list"),
        (put("compute.tiles.0", [128, 0, 1.0]), "compute.tiles[0]", "[128, 0, 1.0]", "above 0"),
        (put("compute.tflops", {"float32": 1.0}), "compute.tflops", "{'float32': 1.0}", "bfloat16"),
        (put("compute.tflops.int8", 1.0), "compute.tflops", "int8", "bfloat16"),
        (put("steps.flag_us", -1), "steps.flag_us", "-1", "at least 0"),
        (put("steps.flag_us", float("nan")), "steps.flag_us", "nan", "a number"),
        (drop("steps.event_us"), "steps.event_us", "None", "a number"),
        (put("slowdown.matmul", True), "slowdown.matmul", "True", "a number"),
        (put("push", []), "push", "[]", "[bytes, microseconds]"),
        (put("push.1", [1, 5.0]), "push[1]", "[1, 5.0]", "more bytes than the point before"),
        (put("reduce.0", [1 << 20, "x"]), "reduce[0]", "'x'", "above 0"),
        (put("collectives.all_gather", {"two": [[1, 1]]}), "collectives.all_gather", "'two'", "a number of ranks"),
        (drop("collectives.all_reduce"), "collectives.all_reduce", "None", "curves by number of ranks"),
        (put("matmuls", [["nt", "bfloat16", 1, 2, 3]]), "matmuls[0]", "['nt', 'bfloat16', 1, 2, 3]", "M, N, K"),
        (put("matmuls", [["tt", "bfloat16", 1, 2, 3, 4]]), "matmuls[0]", "'tt'", "nt/nn/tn"),
        (put("network", {}), "network.source", "None", "a text"),
        (put("network", {**NETWORK, "gbs": 0}), "network.gbs", "0", "at least 0.001"),
        (put("network", {**NETWORK, "transfer_slowdown": -1}), "network.transfer_slowdown", "-1", "a number of at least"),
        (
            put("network", {**NETWORK, "collectives": {"all_gather": {"2": [[1, 1]]}}}),
            "network.collectives.all_gather",
            "'2'",
            "16x2",
        ),
        (
            put("network", {**NETWORK, "collectives": {"all_gather": {"2x4": [[1, 1]]}}}),
            "network.collectives.all_gather",
            "2x4",
            "16x2",
        ),
        (put("network", {**NETWORK, "collectives": {"broadcast": {}}}), "network.collectives", "broadcast", "all_gather"),
        (put("attention", {"dtype": "int8"}), "attention.dtype", "'int8'", "bfloat16"),
        (
            put("attention", {"dtype": "bfloat16", "forward": 0, "backward": 1}),
            "attention.forward",
            "0",
            "a number of at least",
        ),
        (put("collectives.all_to_all", {"2": []}), "collectives.all_to_all.2", "[]", "microseconds"),
        (put("name", ""), "name", "''", "a text"),
    ],
)
def test_broken_file(tmp_path: Path, change: Callable[[Json], None], field: str, got: str, expected: str) -> None:
    """Every error names file, field, got and expected, from the API and as a backend option."""
    found = json.loads(PLAIN.to_json())
    change(found)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(found))
    for call in (lambda: load(path), lambda: parse({"profile": str(path)}, frozenset())):
        with pytest.raises(OptionError) as caught:
            call()
        assert caught.value.where == str(path)
        assert repr(field) in caught.value.what
        assert got in caught.value.got and expected in caught.value.expected
        assert caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '{"sites": [], "version": 1}'])
def test_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="foreign.json"):
        load(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="h200"):
        load(tmp_path / "nowhere.json")
    with pytest.raises(OptionError, match="'profile'"):
        parse({"profile": 7}, frozenset())


def kept(folder: Path, ranks: int, **changes: Any) -> Profile:
    """Store a profile of this machine's CPU in the cache, with some fields of its key changed."""
    found = json.loads(load("cpu").to_json())
    found["name"] = f"kept {ranks} {sorted(changes)}"
    found["key"] = {**machine.key("cpu", ranks), **changes}
    path = profile_store.path_of(found["key"])
    assert path.parent == folder
    stored_file.write(path, json.dumps(found))
    _of_this_machine.cache_clear()
    return Profile.from_json(json.dumps(found), "")


def test_which_profile_is_used(own_cache: Path) -> None:
    """The machine's profile of the nearest group size is used, never one with another key; else the shipped one."""
    assert load(None, 2, "cpu") == load("cpu")
    before = signature(None, ("cpu",))
    kept(own_cache, 2, torch="0.1")
    kept(own_cache, 2, units=999)
    assert load(None, 2, "cpu") == load("cpu") and signature(None, ("cpu",)) == before
    two, eight = kept(own_cache, 2), kept(own_cache, 8)
    assert [load(None, ranks, "cpu") for ranks in (2, 3, 6, 8)] == [two, two, eight, eight]
    assert signature(None, ("cpu",)) == tuple(sorted({two.digest, eight.digest}))
    assert load(two) is two and signature("h200", ()) == (load("h200").digest,)
    profile_store.path_of(dict(two.key)).write_text("{")
    _of_this_machine.cache_clear()
    assert load(None, 2, "cpu") == eight


@pytest.mark.parametrize(
    "text", ['{"key": []}', '{"key": "x"}', '{"key": {"ranks": 0}}', '{"key": {"ranks": 1e400}}', "[" * 100_000]
)
def test_what_else_lies_in_the_cache_is_no_matter(own_cache: Path, text: str) -> None:
    own_cache.mkdir(parents=True, exist_ok=True)
    (own_cache / "other.json").write_text(text)
    assert load(None, 2, "cpu") == load("cpu")
    assert signature(None, ("cpu",)) == (load("cpu").digest,)


def test_fit_finds_the_costs_that_whole_calls_show() -> None:
    """The fit recovers 10 us at the begin and end of each call, and small steps at half of their isolated time."""
    from dataclasses import replace

    truth = with_steps(PLAIN, 10.0, 0.5)
    calls = [
        (kind, 2, "bfloat16", m, n, 512, how)
        for kind in ("all_gather_matmul", "matmul_reduce_scatter")
        for m, n in ((64, 64), (256, 512), (2048, 512))
        for how in ("pipelined:chunks=1", "pipelined", "pipelined:chunks=8")
    ]
    checks = tuple((*call, predict(shape_of(*call[:6]), Strategy.parse(call[6]), truth).us) for call in calls)
    found = fit(replace(PLAIN, checks=checks))
    assert (found.steps.begin_us, found.steps.end_us) == (pytest.approx(10, rel=0.1), pytest.approx(10, rel=0.1))
    assert found.steps.wait_us == pytest.approx(truth.steps.wait_us, rel=0.3)
    assert max(abs(p / us - 1) for _, p, us in compare_calls(found)) < 0.1
    assert Profile.from_json(found.to_json(), "itself") == found
    assert fit(PLAIN) == PLAIN


def test_rates_follow_what_was_measured() -> None:
    from dataclasses import replace

    base = load("h200")
    slow = replace(base, matmuls=tuple((*row[:5], analytic_us(base, row[1], row[0], *row[2:5]) * 2) for row in base.matmuls))
    assert fit_rates(slow).compute.tflops["bfloat16"] == pytest.approx(base.compute.tflops["bfloat16"] / 2, rel=0.1)
