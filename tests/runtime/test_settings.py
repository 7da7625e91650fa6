"""Settings, error texts and the build check, without ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.harness.ranks import PATIENCE_S
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.extension import check_build
from ub_overlap.runtime.schedule.steps import FUSED_SLOTS, SLOTS, SPLIT_SLOTS
from ub_overlap.runtime.session import arena_size, plan_mismatch


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "100", None, True])
@pytest.mark.parametrize("name", ["init_timeout_s", "step_timeout_s"])
def test_deadlines_are_deadlines(name: str, value: object) -> None:
    before = settings.current()
    with pytest.raises(errors.OptionError, match=name):
        settings.configure(**{name: value})
    assert settings.current() == before


def test_unknown_setting() -> None:
    with pytest.raises(
        ValueError, match=r"unknown setting 'step_timeout'.*\n.*init_timeout_s.*\n.*did you mean step_timeout_s"
    ):
        settings.configure(step_timeout=3)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_OVERLAP_STEP_TIMEOUT_S", "7.5")
    assert settings.from_environment() == settings.Settings(step_timeout_s=7.5)
    monkeypatch.setenv("UB_OVERLAP_INIT_TIMEOUT_S", "soon")
    with pytest.raises(errors.OptionError, match="UB_OVERLAP_INIT_TIMEOUT_S"):
        settings.from_environment()


def test_integers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_OVERLAP_FLIGHT_CALLS", "7")
    monkeypatch.setenv("UB_OVERLAP_FLIGHT_SIGNAL", "0")
    assert settings.from_environment() == settings.Settings(flight_calls=7, flight_signal=False)
    for text in ("many", "7.5", "-1"):
        monkeypatch.setenv("UB_OVERLAP_FLIGHT_CALLS", text)
        with pytest.raises(errors.OptionError, match="UB_OVERLAP_FLIGHT_CALLS"):
            settings.from_environment()


def test_advice_names_what_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `configure` the environment variable no longer counts: advising it would not help."""
    monkeypatch.setattr(settings, "_Holder", type("Holder", (), {"settings": None, "configured": frozenset()}))
    assert settings.advise("step_timeout_s") == "raise UB_OVERLAP_STEP_TIMEOUT_S"
    settings.configure(trace=False)
    assert settings.advise("step_timeout_s") == "raise UB_OVERLAP_STEP_TIMEOUT_S"
    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=before)
    assert settings.advise("step_timeout_s").startswith("raise step_timeout_s where ub_overlap.configure(...) sets it")


def test_built_for_another_torch() -> None:
    with pytest.raises(errors.BuildMismatchError, match=r"9\.9\.9") as caught:
        check_build({"torch": "9.9.9"}, torch.__version__)
    assert torch.__version__ in str(caught.value)
    assert "pip install" in caught.value.fix


@pytest.mark.tier("test")
def test_no_extension() -> None:
    code = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'ub_overlap._C' else found(n, *a)\n"
        "try:\n import ub_overlap.runtime.ops\nexcept Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.stdout.startswith("BuildMismatchError the compiled part of ub_overlap is missing"), done.stdout + done.stderr


def test_messages_say_all() -> None:
    text = str(errors.ArenaError("no", where="there", got="this", expected="that", fix="so"))
    assert text == "no\n  where:    there\n  got:      this\n  expected: that\n  fix:      so"
    assert issubclass(errors.OptionError, ValueError)


def test_slot_sizes() -> None:
    assert arena_size.round_slot_bytes(1) == 1 << 18
    assert arena_size.round_slot_bytes(300_000) == 5 << 16
    assert arena_size.round_slot_bytes(1 << 27) == 1 << 27
    assert arena_size.round_slot_bytes((1 << 28) + 1) == (1 << 28) + (1 << 25)
    assert arena_size.round_slot_bytes(10**9) % (1 << 16) == 0


def test_first_difference() -> None:
    a = '{"shared": {"sites": [{"id": "f.0", "strategy": "bulk"}, {"id": "f.1", "strategy": "bulk", "ranks": 3}]}}'
    b = a.replace("3", "4")
    assert plan_mismatch.find_first_difference(a, b) == (
        "site id=f.1 strategy=bulk ranks=3",
        "site id=f.1 strategy=bulk ranks=4",
    )
    assert plan_mismatch.find_first_difference(a, None) is None
    assert plan_mismatch.find_first_difference('{"shared": {"sites": []}}', a) == (
        "site no such site",
        "site id=f.0 strategy=bulk",
    )


def test_process_wide_values_are_pushed() -> None:
    info = ops.extension().build_info()
    assert info["torch"] == torch.__version__
    assert info["version"] == "0.1.0"


def test_python_and_cpp_use_the_same_number_of_slots() -> None:
    assert ops.extension().slots == SLOTS
    assert ops.extension().split_slots == SPLIT_SLOTS
    assert ops.extension().fused_slots == FUSED_SLOTS
