"""Tests of calibration on CPU ranks: it ends in time, and its profile of this machine is then used."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.cost.machine import PLAIN
from tests.gpu.launch import Finished, launch, torchrun
from tests.harness.programs import run_program
from ub_overlap.compiler.cost import SiteShape, choose, load
from ub_overlap.compiler.cost.fused_curves import FORMS
from ub_overlap.compiler.cost.matmul_time import analytic_us
from ub_overlap.compiler.cost.network import Network, network_us
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.plan.reasons import COLLECTIVES
from ub_overlap.runtime import machine
from ub_overlap.runtime.errors import OptionError
from ub_overlap.tools.calibrate import algorithms, direct_stores, few_tokens, matmuls, run, world
from ub_overlap.tools.calibrate import calibrate as calibration
from ub_overlap.tools.calibrate.calibrate import calibrate as measure
from ub_overlap.tools.calibrate.fit import compare_calls, fit, median_error
from ub_overlap.tools.calibrate.network import fit_network

PACE = 120


def assert_verdict(done: Finished) -> None:
    """The exit code is that of the verdict. Which one it is depends on what else this machine runs."""
    verdict = {0: "the profile is usable: ", 1: "the profile is not usable: whole calls are predicted with"}
    assert done.code in verdict and verdict[done.code] in done.output, done.output


def calibrate(ranks: int, folder: Path, *arguments: str, hosts: str = "") -> Finished:
    env = {"UB_OVERLAP_CACHE_DIR": str(folder), "UB_OVERLAP_HOSTS": hosts}
    return run_program(ranks, "ub_overlap", ["calibrate", "--device", "cpu", "--quick", *arguments], env, folder, PACE)


@pytest.mark.tier("full")
def test_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    command = [*torchrun(2), "-m", "ub_overlap", "calibrate", "--device", "cpu", "--quick", "--out", str(path)]
    done = launch(command, PACE, {"UB_OVERLAP_CACHE_DIR": str(tmp_path)})
    assert_verdict(done)
    assert str(path) in done.output and "whole calls: median error" in done.output
    assert "[" in done.output and "100%" in done.output and "matmuls" in done.output
    profile = load(path)
    assert dict(profile.key) == json.loads(json.dumps(machine.key("cpu", 2)))
    assert profile.holes == () and "measured" in profile.source
    assert len(profile.matmuls) == len(matmuls.points(False, True))
    assert {kind: set(curves) for kind, curves in profile.collectives.items()} == {kind: {2} for kind in COLLECTIVES}
    assert profile.attention is not None and profile.attention.dtype == "float32" and profile.attention.backward > 0
    assert profile.matmuls != load("cpu").matmuls and profile.push != load("cpu").push
    assert profile.direct is not None and profile.direct.link_gbs > 0
    assert [row[:5] for row in profile.direct.matmuls] == [("float32", 2, *s) for s in direct_stores.shapes(False, True)]
    assert profile.fused is not None and {kind: set(by) for kind, by in profile.fused.curves.items()} == {
        "all_reduce": {2}, "reduce_scatter": {2}, "all_gather": {2},
    }  # fmt: skip
    assert set(profile.fused.curves["all_reduce"][2]) == set(FORMS)
    assert set(profile.fused.curves["all_gather"][2]) == {"none", "one_shot"}
    shape = SiteShape("matmul_reduce_scatter", 2, "float32", ((4096, 512, 512, False),), 4096, 512)
    predictions = choose(shape, profile).predictions
    assert "direct" in predictions and all(p.us > 0 for p in predictions.values())


@pytest.mark.tier("full")
def test_out_file_and_no_cache(tmp_path: Path) -> None:
    done = calibrate(3, tmp_path, "--out", str(tmp_path / "mine.json"))
    assert_verdict(done)
    profile, base = load(tmp_path / "mine.json"), load("cpu")
    assert profile.key["ranks"] == 3
    kept = base.key["gpu"] == profile.key["gpu"]
    assert set(profile.collectives["all_gather"]) == ({2, 3} if kept else {3})
    assert profile.source.endswith("; collectives of 2 ranks from profile cpu") == kept
    assert not (tmp_path / "profiles").exists()


@pytest.mark.tier("test")
def test_several_hosts(tmp_path: Path) -> None:
    """Only the network is measured. The profile is the one that ranks of one host then use."""
    done = calibrate(2, tmp_path, hosts="a,b")
    assert done.code == 0, done.output
    (path,) = (tmp_path / "profiles").glob("*.json")
    assert str(path) in done.output and "GB/s a rank to other hosts" in done.output and "all_reduce 2x2" in done.output
    profile, base = load(path), load("cpu")
    assert replace(profile, network=base.network) == replace(base, key=profile.key)
    assert machine.differing_fields(dict(profile.key), machine.key("cpu", 1)) == []
    assert profile.network is not None and profile.network.source.startswith("measured") and profile.network.gbs > 0
    assert {kind: set(curves) for kind, curves in profile.network.collectives.items()} == {
        kind: {(2, 2)} for kind in COLLECTIVES
    }


def test_the_network_is_fitted_to_its_curves() -> None:
    """A group is predicted by its own curves. Others have the rate and latencies of a made-up network that produced these."""
    true = Network("true", 2.0, 30.0, 3.0, 9.0, 0.3)
    sizes = (1e4, 1e7, 2e7)
    curves = {k: tuple((s, network_us(true, PLAIN.push, k, 8, 4, s)) for s in sizes) for k in COLLECTIVES}
    fitted = fit_network(Network("base", 1.0, 10.0, 1.0, 3.0, 0.3), PLAIN.push, curves, 8, 4)
    assert (fitted.gbs, fitted.base_us, fitted.step_us, fitted.hop_us) == pytest.approx((2.0, 30.0, 3.0, 9.0), rel=1e-3)
    for kind, size in itertools.product(COLLECTIVES, sizes):
        assert network_us(fitted, PLAIN.push, kind, 8, 4, size) == network_us(true, PLAIN.push, kind, 8, 4, size)
        expected = network_us(true, PLAIN.push, kind, 32, 8, size)
        assert network_us(fitted, PLAIN.push, kind, 32, 8, size) == pytest.approx(expected, rel=1e-3)


def with_calls(us_of: Callable[[float, int], float]) -> Profile:
    """Return the profile cpu with whole calls that take `us_of(predicted us, number)`."""
    base = load("cpu")
    calls = [
        (kind, 2, "float32", m, m, m, how, 1.0)
        for m in (64, 512)
        for kind in ("all_gather_matmul", "matmul_reduce_scatter")
        for how in ("pipelined:chunks=1", "pipelined")
    ]
    predicted = compare_calls(replace(base, checks=tuple(calls)))
    return replace(
        base, checks=tuple((*c[:7], us_of(p, n)) for n, (c, (_, p, _)) in enumerate(zip(calls, predicted, strict=True)))
    )


def test_the_costs_of_calls_are_fitted_whatever_they_are() -> None:
    """Beginning and ending a call take a few us on GPUs, and hundreds between CPU ranks."""
    for extra_us in (0.0, 6.0, 60.0, 600.0):
        fitted = fit(with_calls(lambda us, _, extra_us=extra_us: us + extra_us))
        error = median_error(fitted)
        assert error is not None and error < 0.05, (extra_us, error)


@pytest.mark.parametrize("out", ["", "mine.json"])
@pytest.mark.parametrize(
    ("us_of", "problem"),
    [
        (lambda us, number: us, ""),
        (lambda us, number: us * (1 + 0.15 * (-1) ** number), ""),
        (lambda us, number: us * 10 ** (number % 4), "whole calls are predicted with a median error of "),
        (None, "no whole call was measured"),
    ],
    ids=["as predicted", "within 25%", "wrong", "not measured"],
)
def test_the_verdict(
    us_of: Callable[[float, int], float] | None, problem: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The last line says whether the profile is usable. One that is not is only written where --out names a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    measured = with_calls(us_of) if us_of else load("cpu")
    monkeypatch.setattr(world, "start", lambda device: mock.Mock(rank=0, ranks=2, device=mock.Mock(type="cpu")))
    monkeypatch.setattr(world, "end", lambda ranks, failure: None)
    monkeypatch.setattr(calibration, "world_hosts", lambda: ["a", "a"])
    monkeypatch.setattr(run, "run", lambda *_: json.loads(measured.to_json()))
    monkeypatch.setattr(algorithms, "choose", lambda ranks: None)
    assert measure(out or None) is (not problem)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"the profile is not usable: {problem}" if problem else "the profile is usable: ")
    assert ("Calibrate again" in last) == bool(problem)
    assert bool(list(tmp_path.glob("profiles/*.json"))) == (not problem and not out) and Path("mine.json").is_file() == bool(
        out
    )


def test_without_a_home_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile would be lost: the error comes before the ranks start."""
    for name in ("UB_OVERLAP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError))
    monkeypatch.setattr(world, "start", mock.Mock(side_effect=AssertionError("started")))
    with pytest.raises(OptionError, match="no folder for the profile") as caught:
        measure()
    assert "--out FILE" in str(caught.value)


@pytest.mark.tier("test")
def test_outside_of_torchrun(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "ub_overlap", "calibrate", "--device", "cpu"],
        cwd=tmp_path,
        env=clean,
        text=True,
        capture_output=True,
        timeout=PACE,
        check=False,
    )
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m ub_overlap calibrate" in done.stderr


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per step, and every five seconds of one: the matmuls take a minute. Ranks other than 0 print none."""
    clock = mock.Mock(return_value=0.0)
    monkeypatch.setattr(world.time, "monotonic", clock)
    for rank in (0, 1):
        line = world.ProgressLine(mock.Mock(rank=rank, begun=0.0), 20.0)
        for second in range(12):
            clock.return_value = float(second)
            line.step("pushes" if second == 0 else "matmuls", 1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [(text.split()[-1], text.split()[-3]) for text in lines] == [
        ("pushes", "0.0"), ("matmuls", "1.0"), ("matmuls", "6.0"), ("matmuls", "11.0"),
    ]  # fmt: skip


def test_few_tokens_of_any_number_of_ranks() -> None:
    """Rows are whole vectors, also of 3 or 6 ranks, and the sizes are about those of the curve."""
    for ranks, item, size in itertools.product(range(2, 10), (2, 4), few_tokens.SIZES):
        rows, cols = few_tokens.matrix_sizes(size // item, ranks, 8192, few_tokens.VECTOR // item)
        assert cols * item % few_tokens.VECTOR == 0 and rows % ranks == 0 and cols <= 8192
        assert abs(rows * cols * item / size - 1) < 0.05, (ranks, item, size)


@pytest.mark.tier("test")
def test_a_disturbed_matmul_is_measured_again(tmp_path: Path) -> None:
    """Of all times, one that is a thousand times too long. The others stay as they are, but for their own outliers."""
    done = calibrate_behind(
        tmp_path,
        "from ub_overlap.tools.calibrate import matmuls\n"
        "measure = matmuls.measure\n"
        "def disturbed(*arguments):\n"
        "    rows = measure(*arguments)\n"
        "    return [(*rows[0][:5], 1000 * rows[0][5]), *rows[1:]]\n"
        "matmuls.measure = disturbed\n",
    )
    assert_verdict(done)
    profile = load(tmp_path / "out.json")
    assert len(profile.matmuls) == len(matmuls.points(False, True))
    layout, dtype, *shape, us = profile.matmuls[0]
    assert us < 100 * analytic_us(profile, dtype, layout, *shape), profile.matmuls[0]


@pytest.mark.tier("test")
def test_a_probe_that_fails_leaves_a_hole(tmp_path: Path) -> None:
    """A probe that raises on all ranks is named and filled from the shipped profile; the other probes are measured."""
    done = calibrate_behind(
        tmp_path,
        "from ub_overlap.tools.calibrate import traffic\n"
        "def fails(*_):\n    raise RuntimeError('no collectives today')\n"
        "traffic.collectives = fails\n",
    )
    assert_verdict(done)
    profile = load(tmp_path / "out.json")
    assert [hole.partition(":")[0] for hole in profile.holes] == ["collectives"] and "no collectives today" in profile.holes[0]
    assert profile.collectives == load("cpu").collectives
    assert profile.matmuls != load("cpu").matmuls


def calibrate_behind(folder: Path, changes: str) -> Finished:
    """Run a calibration of two CPU ranks behind the lines `changes`. It writes `out.json`."""
    program = folder / "program.py"
    program.write_text(
        f"import sys\n{changes}"
        "from ub_overlap.__main__ import main\n"
        f"sys.exit(main(['calibrate', '--quick', '--device', 'cpu', '--out', {str(folder / 'out.json')!r}]))\n"
    )
    return run_program(2, program, limit_s=PACE)
