"""Tests of planned context parallelism: bytes of each form by hand, exposed exchange, and the command."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ub_overlap.cli import main
from ub_overlap.tools.planner.sizes import CP_FORMS

pytestmark = pytest.mark.tier("test")

HEADS, KV_HEADS, WIDTH, SEQ, RANKS = 8, 4, 64, 8192, 4
HIDDEN = HEADS * WIDTH
BLOCK = ["--hidden", str(HIDDEN), "--ffn", "1024", "--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--seq", str(SEQ)]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *BLOCK, "--min-bytes", "0", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.tier("full")
def test_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each form sends what it must, in bf16; gradients of a ring travel in fp32. Repeated heads travel once."""
    step = plan(capsys, "--cp", str(RANKS), "--html", str(tmp_path / "page.html"))
    forms = {f["form"]: f for f in step["context_parallel"]["forms"]}
    assert forms.keys() == {*CP_FORMS} and not step["context_parallel"]["refused"]
    positions, kv = SEQ // RANKS, KV_HEADS * WIDTH
    shard, whole_heads = 2 * positions * kv, 2 * positions * HIDDEN  # of k, in bf16
    dkv = RANKS * 2 * 2 * shard
    assert forms["gathered"]["bytes_sent"] == 2 * 2 * (RANKS - 1) * shard
    assert forms["ulysses"]["bytes_sent"] == 2 * (2 * whole_heads + 2 * shard) * (RANKS - 1) // RANKS
    assert forms["ring"]["bytes_sent"] == (RANKS - 1) * 2 * shard + dkv
    assert forms["ring_all_to_all"]["bytes_sent"] == forms["ring"]["bytes_sent"]  # backward sends no keys and values
    for form in forms.values():
        assert 0 <= form["exposed_us"] <= form["exchange_us"] and form["step_us"] <= form["none_us"]
        assert form["landing_bytes"] > 0 or "split" not in form["strategies"]
    assert [f["step_us"] for f in step["context_parallel"]["forms"]] == sorted(f["step_us"] for f in forms.values())
    assert step["step"]["chosen_us"] == step["context_parallel"]["forms"][0]["step_us"]
    page = (tmp_path / "page.html").read_text()
    assert 'aria-label="forms"' in page and "exposed exchange" in page


@pytest.mark.tier("full")
def test_with_tensor_and_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are sharded over the ranks of both; the exchange is a group of its own. Norms' gradients are summed over TP."""
    step = plan(capsys, "--tp", "2", "--cp", "2", "--dp", "2", "--cp-form", "gathered")
    assert step["block"]["cp_form"] == "gathered"
    ranks = sorted({(s["ranks"], s["kind"].removesuffix("_matmul").removeprefix("matmul_")) for s in step["sites"]})
    assert ranks == [
        (n, k) for n in (2, 4) for k in ("all_gather", "all_reduce", "reduce_scatter") if (n, k) != (4, "all_reduce")
    ]
    (form,) = step["context_parallel"]["forms"]
    assert form["bytes_sent"] == 4 * 2 * (SEQ // 2) * KV_HEADS // 2 * WIDTH


@pytest.mark.tier("full")
def test_a_stage_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    step = plan(capsys, "--cp", "2", "--pp", "2", "--microbatches", "4", "--cp-form", "ulysses")
    assert step["block"]["cp_form"] == "ulysses" and {s["kind"] for s in step["sites"]} == {"all_to_all"}
    assert step["pipeline"]["message_bytes"] == SEQ // 2 * HIDDEN * 2


def test_forms_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    step = plan(capsys, "--heads", "2", "--kv-heads", "2", "--cp", "4", "--cp-form", "gathered")
    assert [f["form"] for f in step["context_parallel"]["forms"]] == ["gathered"]
    for arguments, message in (
        (["--heads", "2", "--kv-heads", "2", "--cp", "4", "--cp-form", "ulysses"], "a divisor of the 2 heads"),
        (["--cp", "3"], "a sequence of two parts for each rank"),
        (["--cp", "2", "--cp-form", "zigzag"], "gathered or ring"),
        (["--tp", "2", "--cp-form", "ring"], "--cp-form needs --cp"),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["plan", *BLOCK, *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
