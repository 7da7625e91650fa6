"""Tests that the benchmarks run on CPU ranks and store complete documents. No result depends on timing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import packed_float8, report
from benchmarks.blocks.__main__ import parse_flags
from benchmarks.blocks.table import hidden
from benchmarks.ops import measure as measuring
from benchmarks.ops.collectives import C10dCollectives
from benchmarks.ops.suite import SuiteRow, load
from benchmarks.ops.table import derive, mean, summary
from benchmarks.ops.table import text as ops_text
from benchmarks.plot import _title as plot_title
from benchmarks.plot import draw
from tests.gpu.launch import launch, torchrun
from tests.harness.programs import run_program
from tests.harness.ranks import PATIENCE_S, RankPool
from ub_overlap.tools.rank_process import World

ROOT = Path(__file__).resolve().parents[1]
FACTS = {"date", "ranks", "device", "devices", "driver", "torch", "cuda", "nccl", "commit", "command", "build", "rows"}


def on_cpu_ranks(ranks: int, module: str, arguments: Sequence[str]) -> str:
    """Return the output of a benchmark on CPU ranks."""
    finished = run_program(ranks, module, ["--device", "cpu", *arguments])
    assert finished.code == 0, f"{finished.why()}\n{finished.output}"
    return finished.output


def printed(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the output of benchmarks.report for a file."""
    monkeypatch.setattr(sys, "argv", ["report", str(path)])
    assert report.main() == 0
    return capsys.readouterr().out


@pytest.mark.tier("full")
def test_ops_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three ranks take part. Columns that need CUDA are omitted with that reason; all others have times."""
    path = tmp_path / "ops.json"
    arguments = [
        "--suite",
        "tiny",
        "--rows",
        "* tiny 64,* tiny row 64",
        "--tp",
        "2",
        "--iters",
        "2",
        "--warm",
        "1",
        "--json",
        str(path),
    ]
    command = [*torchrun(3), "-m", "benchmarks.ops", "--device", "cpu", *arguments]
    finished = launch([*command, "--strategies", "pipelined,pipelined:chunks=4,nonsense"], PATIENCE_S)
    assert finished.code == 0, finished.output
    out = finished.output
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS
    assert document["benchmark"] == "ops" and document["ranks"] == 2 and document["transports"] == ["shared memory"]
    assert [(row["kind"], row["M"]) for row in document["rows"]] == [("AG", 64), ("RS", 64)] * 2
    for row in document["rows"]:
        timed = {"gemm", "nccl", "seq", "ours pipelined", "ours pipelined:chunks=4", "cut pipelined", "last pipelined"}
        assert row["ms"].keys() >= timed and all(ms > 0 for ms in row["ms"].values())
        assert row["host_us"].keys() == {"seq", "ours pipelined", "ours pipelined:chunks=4"}
        assert all(row["why"][name] == "needs CUDA" for name in ("push", "B", "seq_g", "torch", "torch_g", "ours_g pipelined"))
        assert "OptionError" in row["why"]["ours nonsense"]
        assert 0 <= row["error"]["ours pipelined"] < 1e-4
        assert ("ours_wire pipelined" in row["ms"]) == (row["kind"] == "RS" and row["fp8"] == "row")
        assert not row["why"].keys() & row["ms"].keys()
    text = printed(path, capsys, monkeypatch)
    assert document["command"] in text and "torchrun --nproc-per-node 3 -m benchmarks.ops" in document["command"]
    for op in ("AG tiny", "RS tiny"):
        assert f"| {op}" in text and op in out
    assert "float8 wire" in text


@pytest.mark.tier("full")
def test_blocks_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "blocks.json", tmp_path / "profile"
    arguments = ["--size", "tiny", "--seq", "32", "--iters", "2", "--warm", "1", "--json", str(path), "--profile", str(folder)]
    out = on_cpu_ranks(2, "benchmarks.blocks", [*arguments, "--host", "--ours", 'forced={"overlap": "force"}'])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "blocks"
    (size,) = document["rows"]
    variants = size["variants"]
    assert list(variants) == ["inductor", "asynctp", "forced", "compute"]
    assert variants["asynctp"]["why"] == {"*": "needs CUDA"}
    for name in ("inductor", "forced", "compute"):
        assert variants[name]["step"] > 0 and variants[name]["forward"] > 0, name
    assert variants["forced"]["sites"].startswith("8 of ")
    assert 0 <= variants["forced"]["error"] < 1e-3
    host = variants["forced"]["host"]
    assert host["step_us"] > 0 and host["forward_us"] > 0
    assert {op: calls for op, (calls, _) in host["ops"].items() if op == "ub_overlap::all_gather_matmul"}
    assert "by time" in (folder / "tiny_tp2_forced.txt").read_text()
    text = printed(path, capsys, monkeypatch)
    assert "| tiny block, 32 tokens" in text and "until a step returns" in text and "forced" in out


@pytest.mark.tier("full")
def test_feed_forward_alone(tmp_path: Path) -> None:
    """Norm and feed-forward have two sites per direction. TransformerEngine needs CUDA, and is no variant of a block."""
    path = tmp_path / "mlp.json"
    arguments = ["--size", "tiny", "--seq", "32", "--iters", "2", "--warm", "1", "--json", str(path)]
    mlp = ["--model", "mlp", "--variants", "inductor,ours,compute,te_fp8", "--ours", 'forced={"overlap": "force"}']
    assert "tiny mlp, 32 tokens" in on_cpu_ranks(2, "benchmarks.blocks", [*arguments, *mlp])
    (size,) = json.loads(path.read_text())["rows"]
    variants = size["variants"]
    assert size["model"] == "mlp" and variants["te_fp8"]["why"] == {"*": "needs CUDA"}
    assert variants["forced"]["sites"] == "4 of 4" and 0 <= variants["forced"]["error"] < 1e-3
    assert all(variants[name]["step"] > 0 for name in ("inductor", "forced", "compute"))
    with pytest.raises(AssertionError, match="variants of inductor, asynctp, ours, compute"):
        on_cpu_ranks(2, "benchmarks.blocks", [*arguments, "--variants", "te"])


@pytest.mark.tier("full")
def test_mirror_of_two_blocks(tmp_path: Path) -> None:
    """Two processes run two blocks of four ranks in a row. Variants of torch are refused; a waterfall needs CUDA."""
    path = tmp_path / "blocks.json"
    arguments = ["--size", "tiny", "--seq", "32", "--iters", "2", "--warm", "1", "--json", str(path), "--layers", "2"]
    forced = ["--ours", 'forced={"overlap": "force"}']
    out = on_cpu_ranks(2, "benchmarks.blocks", [*arguments, *forced, "--mirror", "4", "--waterfall"])
    document: dict[str, Any] = json.loads(path.read_text())
    (size,) = document["rows"]
    assert document["ranks"] == 4 and size["layers"] == 2 and list(size["variants"]) == ["forced", "compute"]
    assert document["mirror"] in out and "tiny 2 blocks, 32 tokens" in out and "over compute" in out
    forced_row, compute = size["variants"]["forced"], size["variants"]["compute"]
    assert forced_row["sites"] == "16 of 16" and forced_row["step"] > 0 and compute["forward"] > 0
    assert forced_row["why"]["waterfall"] == "needs CUDA" and "waterfall" not in size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mirror", "4", "--variants", "inductor"], "expected sizes of 8b, 70b, tiny and variants of ours, compute, nocomm"),
        (["--mirror", "2"], "a group of more than 2 ranks"),
        (["--mirror", "4", "--tp", "2"], "and no --tp"),
        (["--layers", "0"], "expected 1 or more"),
    ],
)
def test_arguments_of_blocks(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["blocks", *arguments])
    with pytest.raises(SystemExit):
        parse_flags()
    assert message in capsys.readouterr().err


def guarded(rank: int, world: int) -> dict[str, Any]:
    """Measure a row in which one strategy is wrong on the last rank and another returns NaN."""
    group: Any = dist.group.WORLD
    here = World(rank, world, torch.device("cpu"), group.group_name, dist.new_group(backend="gloo"))

    class Wrong(measuring.Case):
        def ours(self, strategy: str, group: str, keep: bool = False) -> Any:
            right = self.seq

            def call() -> torch.Tensor:
                out = right().clone()
                if strategy == "stale" and rank == world - 1:
                    out[-1] += 0.1
                return out / 0 * 0 if strategy == "nan" else out

            return call

        def pieces(self, strategy: str) -> list[int]:
            return [self.row.M]

    measuring.Case = Wrong  # type: ignore[misc]
    columns, collectives = ("seq,ours*", 2, 1, None), C10dCollectives(here)
    setting = measuring.OpContext(
        here, torch.float32, ["right", "stale", "nan"], *columns, here.group, collectives, here.new_group
    )
    return measuring.measure(SuiteRow("AG", "guard", 8 * world, 4 * world, 16), setting)


def test_wrong_numbers_get_no_time(pool2: RankPool) -> None:
    for row in pool2.run(guarded):
        assert row["ms"].keys() == {"seq", "ours right"}
        assert "wrong numbers" in row["why"]["ours stale"] and "wrong numbers" in row["why"]["ours nan"]


def reason(rank: int, world: int) -> str:
    """Return why a variant has no times that Dynamo refused on the last rank."""
    here = World(rank, world, torch.device("cpu"), "0", dist.new_group(backend="gloo"))

    def refused() -> None:
        if rank == world - 1:
            raise RuntimeError("backend='ub_overlap' raised:\nOptionError: fp8: got 1\n\nSet TORCHDYNAMO_VERBOSE=1")

    return here.agreed(refused)[1]


def test_a_reason_says_what_was_raised(pool2: RankPool) -> None:
    assert pool2.run(reason) == 2 * ["rank 1: RuntimeError: backend='ub_overlap' raised: OptionError: fp8: got 1"]


def stored(**ms: float) -> dict[str, Any]:
    """Return a row of a CUDA run, as stored."""
    times = {
        name.replace("__", ":chunks=").replace("ours_g_", "ours_g ").replace("last_", "last "): t for name, t in ms.items()
    }
    return {"kind": "AG", "name": "x", "M": 8192, "N": 8, "K": 8, "ms": times, "why": {}, "host_us": {"ours pipelined": 50.0}}


def test_ratios() -> None:
    """Ratios compare the best strategy with the lower bound and the best rival; `keep` columns are excluded."""
    row = stored(B=1.0, push=0.5, seq_g=2.0, torch_g=1.5, ours_g_pipelined=1.2, ours_g_pipelined__4=1.25, ours_g_keep=1.1)
    row["ms"] |= {"last pipelined": 0.25, "ours pipelined": 1.5}
    found = derive(row)
    assert found["best"] == "pipelined" and found["T/B"] == 1.2 and found["bound"] == 0.75
    assert found["rival"] == "torch_g" and found["gain"] == 1.25 and found["eager/graph"] == 1.25 and found["host_us"] == 50
    assert mean([2.0, None, 8.0]) == pytest.approx(4.0) and mean([]) is None
    lost = stored(B=1.0, push=0.5, seq_g=1.1, ours_g_pipelined=1.2)
    assert "1 under 0.98" in summary([row, lost]) and "ours 1.20 x B" in summary([row, lost])
    assert derive({"ms": {}})["T/B"] is None


def test_floor_with_the_sum() -> None:
    """A reduce_scatter of 4 ranks reads 4 shards of its rows and writes one: 5/4 of 128 MiB at 4.2 TB/s are 40 us."""
    scatter = stored(B=1.0, push=0.5, seq_g=2.0, ours_g_pipelined=1.2) | {"kind": "RS", "N": 8192, "ranks": 4}
    assert derive(scatter)["B + sum"] == pytest.approx(1.03995, rel=1e-4)
    assert derive(scatter)["T/(B + sum)"] == pytest.approx(1.2 / 1.03995, rel=1e-4)
    assert "1.15 x (B + sum)" in summary([scatter]) and "| 1.040" in ops_text({"rows": [scatter]}, "github")
    gather = stored(B=1.0, ours_g_pipelined=1.2) | {"ranks": 4}
    assert derive(gather)["B + sum"] is None and "B + sum" not in ops_text({"rows": [gather]}, "github")


@pytest.mark.tier("full")
def test_mirror_of_four_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes time a group of four. Results are compared with those of two ranks in the same roles, and tables say so."""
    path = tmp_path / "mirror.json"
    arguments = ["--suite", "tiny", "--rows", "AG tiny 64,RS tiny row 64", "--mirror", "4", "--iters", "2", "--warm", "1"]
    out = on_cpu_ranks(2, "benchmarks.ops", [*arguments, "--json", str(path), "--strategies", "pipelined,pipelined:stripes=2"])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["ranks"] == 4 and len(document["devices"]) == 2 and document["transports"] == ["mirror"]
    assert document["mirror"].startswith("Mirror of 4 ranks on 2 GPUs") and "Results are not those of 4 ranks" in out
    gather, scatter = document["rows"]
    assert gather["bytes"] == 3 * 16 * 32 * 2 and scatter["bytes"] == 3 * 16 * 128 * 2
    for row, wanted in ((gather, {"ours pipelined"}), (scatter, {"ours pipelined", "ours pipelined:stripes=2"})):
        assert row["ms"].keys() >= {"gemm", "cut pipelined", *wanted} and row["ranks"] == 4
        assert not row["ms"].keys() & {"nccl", "seq", "seq_g", "torch", "torch_g"}
        assert all(row["why"][name] == "mirror: its ranks do not exist" for name in ("nccl", "seq", "torch_g"))
        assert 0 <= row["error"]["ours pipelined"] < 1e-4
    text = printed(path, capsys, monkeypatch)
    assert document["mirror"] in text and "2 x " in text


def test_memory_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates count bytes read and written: a copy of 128 MiB moves 256, a sum of 4 parts of 128 MiB together 160."""
    rows = [
        {"kernel": "copy", "mib": 128, "sources": 1, "us": 64.0, "off_us": 32.0},
        {"kernel": "sum of 4", "mib": 128, "sources": 4, "us": 50.0, "off_us": 10.0},
        {"kernel": "copy by the driver", "mib": 32, "sources": 1, "us": 20.0, "off_us": 5.0},
    ]
    facts = {"date": "today", "devices": ["H200"], "torch": "2.11", "command": "python -m benchmarks.memory"}
    document = {"benchmark": "memory", **facts, "matmul": [8192, 8192, 8192], "matmul_us": 1380.0, "rows": rows}
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(document))
    text = printed(path, capsys, monkeypatch)
    lines = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines() if "|" in line
    }
    assert lines["copy"] == ["128", "64.0", "4.19", "4.0", "32.0", "50%"]
    assert lines["sum of 4"][2:4] == ["3.36", "3.8"] and lines["copy by the driver"][3] == "-"
    assert "goals missed:\nsum of 4, 128 MiB: 3.36 TB/s, goal 3.8" in text


def test_share_hidden() -> None:
    times = {"inductor": {"step": 10.0}, "compute": {"step": 6.0}, "ours": {"step": 8.0}, "worse": {"step": 11.0}}
    assert hidden(times, "ours", "step") == 0.5 and hidden(times, "worse", "step") == -0.25
    assert hidden(times, "inductor", "step") is None and hidden(times, "ours", "forward") is None


def test_suites(tmp_path: Path) -> None:
    rows = load("h200")
    assert len(set(rows)) == len(rows) == 34
    assert {row.M for row in rows if "70b fc1" in row.name} == {512, 1024, 2048, 4096, 8192, 16384}
    assert set(load("quick")) <= set(rows) and len(load("h200", "RS te*,AG te*")) == 6
    assert SuiteRow("AG", "x", 8, 16, 4).sizes(4) == (8, 4, 4) and SuiteRow("RS", "x", 8, 16, 4).sizes(4) == (8, 16, 1)
    assert SuiteRow("RS", "x", 8, 16, 6).why_not(4) == "K 6 cannot be shared by 4 ranks"
    with pytest.raises(ValueError, match="matches none of 34 rows"):
        load("h200", "XX*")
    bad = tmp_path / "bad.json"
    bad.write_text('[{"kind": "AR", "name": "x", "M": 1, "N": 1, "K": 1}]')
    with pytest.raises(ValueError, match="row 0 is .* expected kind AG or RS"):
        load(str(bad))


def test_report_refuses_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"benchmark": "other"}')
    monkeypatch.setattr(sys, "argv", ["report", str(path)])
    assert report.main() == 1
    assert "expected one of ops, blocks" in capsys.readouterr().err


def test_plot(tmp_path: Path) -> None:
    """The plot is a PNG with matplotlib and a message without it, never an error."""
    row = stored(B=1.0, push=0.5, seq_g=2.0, torch_g=1.5, ours_g_pipelined=1.2, last_pipelined=0.25)
    document = {"benchmark": "ops", "ranks": 4, "devices": ["H200"], "torch": "2.11", "date": "today", "rows": [row]}
    path = tmp_path / "plot.png"
    mirrored = document | {"mirror": "Mirror of 4 ranks on 2 GPUs", "devices": ["H200"] * 2}
    assert plot_title(document) == "1 x H200, torch 2.11, today"
    assert plot_title(mirrored) == "4 ranks in mirror mode on 2 x H200, torch 2.11, today"
    said = draw(document, str(path))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "matplotlib is not installed" in said and not path.exists()
    else:
        assert said.endswith("is drawn") and path.read_bytes().startswith(b"\x89PNG")


def test_predictions_of_packed_float8(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy never saves more than no copy. One of 70B over 8 ranks pays."""
    monkeypatch.setattr(sys, "argv", ["packed_float8", "--profile", "h200"])
    packed_float8.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == 6 and all(int(cached) >= int(joined) for *_, cached, joined in rows)
    assert rows[-1][:3] == ["h200", "70b", "8"] and int(rows[-1][-1]) > 0
