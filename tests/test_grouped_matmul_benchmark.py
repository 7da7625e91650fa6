"""The benchmark of grouped matmuls runs on the CPU and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.grouped_matmul.__main__ import POOL, Operands, main, shapes
from benchmarks.grouped_matmul.table import FORMS
from tests.test_benchmarks import FACTS, printed


@pytest.mark.tier("full")
def test_grouped_matmul_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grouped_matmul.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["grouped_matmul", "--tiny", "--json", str(path)])
    main()
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS - {"rows"} and document["benchmark"] == "grouped_matmul"
    assert [shape.split()[0] for shape in document["shapes"]] == [form for form in FORMS if form != "float8"]
    (row,) = document["pieces"]
    assert list(row["us"]) == ["1", "2", "4", "8"] and min(row["us"].values()) > 0 < min(document["shapes"].values())
    text = printed(path, capsys, monkeypatch)
    assert "mean |error|" in text and "transfer, 8 ranks" in text


def test_products() -> None:
    """Each form multiplies groups as it says: compared with a loop over the groups."""
    operands = Operands(torch.device("cpu"), 1 << 14)
    for form, product in (("nt", None), ("nn", None), ("tn", (2, 16, 32)), ("batch", (2, 16, 32))):
        call = operands.call((form, 2, 16, 32, 48))
        found = call()
        assert found.shape == (product or (32, 32)), form
        assert not torch.equal(found, call()), "operands rotate"
    x = operands.cut(operands.pools[0], (32, 48))[0]
    w = operands.cut(operands.pools[1], (2, 32, 48))[0]
    expected = torch.cat([part.float() @ m.t().float() for part, m in zip(x.chunk(2), w, strict=True)])
    torch.testing.assert_close(operands.call(("nt", 2, 16, 32, 48))().float(), expected, rtol=2e-2, atol=2e-2)


def test_shapes_fit_the_pools() -> None:
    found = shapes(tiny=False)
    assert len(found) == len(set(found)) and {form for form, *_ in found} == set(FORMS)
    assert all(max(groups * m * n, groups * m * k, groups * n * k) <= 2 * POOL for _, groups, m, n, k in found)
