"""Tests of planned steps with expert parallelism: exchanges next to other parallelism, and what they leave exposed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compiler.rank_compile import decisions_of
from tests.harness.ranks import RankPool
from ub_overlap.cli import main
from ub_overlap.runtime.errors import OptionError
from ub_overlap.tools.planner.models import block_input, parallel_blocks
from ub_overlap.tools.planner.sizes import PlannedBlock

pytestmark = pytest.mark.tier("test")

# A layer like those of DeepSeek-V2-Lite, with a shared expert.
LAYER = ["--hidden", "2048", "--ffn", "1408", "--heads", "16", "--seq", "4096", "--experts", "64", "--experts-per-token", "6"]
SHARED = ["--shared-ffn", "2816"]
SMALL = PlannedBlock(
    hidden=64, ffn=48, heads=8, kv_heads=4, seq=16, tp=1, dp=2, ep=2, experts=2, experts_per_token=2, shared_ffn=32
)
"""Each token goes to both experts, so real tokens are balanced as well."""


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    step: dict[str, Any] = json.loads(capsys.readouterr().out)
    return step


def exchanges(step: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    """Return the exchanges of rows."""
    found = [s for s in step["sites"] if s["parallelism"] == "EP" and s["phase"] == phase and s["dtype"] == "bfloat16"]
    assert {s["kind"] for s in found} == {"all_to_all"}
    return found


@pytest.mark.tier("full")
def test_a_shared_expert_hides_the_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one a forward has only the sort of rows, next to the dispatch. Weight gradients hide the backward of the dispatch
    in both."""
    without, step = (planned(capsys, *LAYER, *shared, "--dp", "8", "--ep", "8") for shared in ([], SHARED))
    for one in (without, step):
        assert [s["reason"] for s in one["sites"] if s["parallelism"] == "EP" and s["dtype"] == "int64"] == [
            "dtype_unsupported"
        ]
        assert [len(exchanges(one, phase)) for phase in ("forward", "backward")] == [2, 2]
        split = [s for s in exchanges(one, "backward") if s["strategy"] == "split"]
        assert {s["bytes"] for s in split} == {7 * 4096 * 6 // 8 * 2048 * 2}
        assert one["step"]["rest_us"]["experts"] > 0 and set(one["exposed"]) == {"DP", "EP"}
        plain = [s["predicted_us"]["none"] for phase in ("forward", "backward") for s in exchanges(one, phase)]
        assert one["exposed"]["EP"]["communication_us"] == pytest.approx(sum(plain), abs=0.1)
    dispatch, combine = exchanges(without, "forward")
    assert (dispatch["strategy"], combine["strategy"]) == ("split", "none")
    assert dispatch["predicted_us"]["split"] > 0.6 * dispatch["predicted_us"]["none"]
    first, last = exchanges(without, "backward")
    assert (first["strategy"], last["strategy"]) == ("split", "split")
    assert first["predicted_us"]["split"] > 0.8 * first["predicted_us"]["none"]  # the router alone hides little
    assert last["predicted_us"]["split"] < 0.3 * last["predicted_us"]["none"]
    assert "split" in {s["strategy"] for s in exchanges(step, "forward")}
    shares = [one["exposed"]["EP"]["exposed_us"] / one["exposed"]["EP"]["communication_us"] for one in (step, without)]
    assert shares[0] < shares[1] < 1


@pytest.mark.tier("full")
def test_next_to_tensor_and_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of tensor parallelism share experts, too; two ranks have the same experts, whose weights are sharded."""
    step = planned(capsys, *LAYER, *SHARED, "--tp", "2", "--dp", "8", "--ep", "8", "--ranks-per-host", "16")
    assert set(step["exposed"]) == {"TP", "DP", "EP"}
    ranks = {(s["parallelism"], s["ranks"]) for s in step["sites"]}
    assert ranks == {("TP", 2), ("DP", 8), ("DP", 2), ("EP", 8)}
    assert len([s for s in step["sites"] if (s["parallelism"], s["ranks"]) == ("DP", 2) and s["phase"] == "forward"]) == 3
    for one in step["exposed"].values():
        assert 0 <= one["exposed_us"] <= 1.1 * one["communication_us"]


WIDE = ["--hidden", "5120", "--ffn", "1536", "--heads", "128", "--seq", "4096", "--experts", "160", "--experts-per-token", "6"]
"""A layer like those of DeepSeek-V2."""


@pytest.mark.tier("full")
def test_halves_of_the_tokens_across_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """Each exchange of a half may be hidden by experts of the other one. Within a host, weight gradients that are added twice
    take what that saves."""
    hosts, host = (planned(capsys, *WIDE, "--dp", n, "--ep", n) for n in ("16", "8"))
    assert hosts["block"]["halves"] and not host["block"]["halves"]
    for step in (hosts, host):
        times = step["tokens_us"]
        assert min(times.values()) <= step["step"]["chosen_us"] == times["halves" if step["block"]["halves"] else "whole"]
    whole = planned(capsys, *WIDE, "--dp", "16", "--ep", "16", "--split-tokens", "off")
    assert "tokens_us" not in whole and whole["step"]["chosen_us"] == hosts["tokens_us"]["whole"]
    assert hosts["step"]["chosen_us"] < 0.95 * whole["step"]["chosen_us"]
    rows = [[s for s in step["sites"] if s["parallelism"] == "EP" and s["dtype"] == "bfloat16"] for step in (whole, hosts)]
    assert [len(found) for found in rows] == [4, 8]
    assert {2 * s["bytes"] for s in rows[1] if s["bytes"]} == {s["bytes"] for s in rows[0] if s["bytes"]}
    split = [sum(s["strategy"].startswith("split") for s in found) / len(found) for found in rows]
    assert split[0] < split[1], "more of the exchanges are hidden"


@pytest.mark.tier("full")
def test_halves_that_were_requested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LAYER, "--dp", "8", "--ep", "8", "--split-tokens", "force", "--quiet"]) == 0
    assert "64 experts, 6 of a token in two halves" in capsys.readouterr().out
    with pytest.raises(OptionError, match="halves have rows that divide by ep=8"):
        replace(SMALL, seq=12, dp=8, ep=8, experts=8, hidden=64, heads=8, ffn=64, shared_ffn=64, halves=True)


@pytest.mark.tier("full")
def test_known_model_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "mixtral-8x7b", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "8 experts, 2 of a token" in text and "DP 8, EP 8" in text and "experts " in text
    assert "exposed communication as chosen: DP " in text and ", EP " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "8", "--ep", "3"], "a divisor of tp * cp * dp = 8"),
        (["--tp", "2", "--dp", "8", "--ep", "1"], "a multiple of tp=2"),
        (["--dp", "128", "--ep", "128"], "a multiple of ep=128"),
        (["--dp", "8", "--ep", "8", "--experts-per-token", "65"], "at least experts_per_token=65"),
        (["--dp", "8", "--ep", "8", "--seq", "4095"], "divide by ep=8"),
        (["--dp", "8", "--ep", "8", "--dtype", "fp32"], "bf16 with --experts"),
        (["--dp", "8", "--ep", "8", "--experts", "1"], "1 without --experts"),
    ],
    ids=str,
)
def test_what_cannot_be_planned(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["plan", *LAYER, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.tier("full")
def test_a_saved_plan_is_what_compiling_the_block_gives(pool2: RankPool, tmp_path: Path) -> None:
    """A compiled block has the sites of its saved plan, with the requested strategies."""
    path, forced = str(tmp_path / "plan.json"), tmp_path / "rules.json"
    forced.write_text('[{"kind": "all_to_all", "strategy": "split"}]')
    names = ("hidden", "ffn", "heads", "kv_heads", "seq", "tp", "dp", "ep", "experts", "experts_per_token", "shared_ffn")
    sizes = [x for n in names for x in (f"--{n.replace('_', '-')}", str(getattr(SMALL, n)))]
    assert main(["plan", *sizes, "--profile", "cpu", "--save", path, "--overrides", str(forced)]) == 0
    planned = [(s["id"], s["kind"], s["strategy"]) for s in json.loads(Path(path).read_text())["sites"]]
    assert [s for _, kind, s in planned if kind == "all_to_all"] == ["none", "split", "split", "split", "split"]
    for compiled_sites in pool2.run(compiled, path):
        assert compiled_sites == planned


def compiled(rank: int, world: int, path: str) -> list[tuple[str, str, str]]:
    torch.manual_seed(3)
    ranks = torch.arange(world)
    dense = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
    blocks = parallel_blocks(SMALL, dense, DeviceMesh("cpu", ranks.view(1, world), mesh_dim_names=("replicas", "ep")))
    with torch.no_grad():
        for p in blocks.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    x = torch.randn(block_input(SMALL).shape, dtype=torch.bfloat16, requires_grad=True)
    options = {"overlap": "force", "inner": "aot_eager", "overrides": path}  # gathers of norms are unmatched: "non_linear"
    return [(d.id, d.kind.value, str(d.strategy)) for d in decisions_of(blocks, (x,), options)]
