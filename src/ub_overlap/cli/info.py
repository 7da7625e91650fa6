"""`info`: print versions, the extension and the CUDA devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from typing import Any

from ub_overlap import __version__
from ub_overlap.runtime import plan_store

from .parsers import add_verb


def info() -> dict[str, Any]:
    """Return installed versions. `problem`: None, or the reason why the package cannot run. Imports torch and the extension."""
    facts: dict[str, Any] = {
        "ub_overlap": __version__,
        "python": platform.python_version(),
        "torch": None,
        "extension": None,
        "cuda_devices": 0,
        "reports": None,
        "problem": None,
    }
    with contextlib.suppress(FileNotFoundError):  # no home folder
        facts["reports"] = str(plan_store.directory())
    try:
        import torch

        facts["torch"] = str(torch.__version__)
        facts["cuda_devices"] = torch.cuda.device_count()
        from ub_overlap.runtime import ops
        from ub_overlap.runtime.extension import cuda_note

        facts["extension"] = {**ops.load().build_info(), "cuda_note": cuda_note()}
    except Exception as error:  # noqa: BLE001  (any error is the answer of this command)
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def show_info(*, as_json: bool) -> int:
    facts = info()
    if as_json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for key, value in facts.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            print(f"{key:<{width}}  {'none' if value is None else value}")
    return 1 if facts["problem"] else 0


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "info", "print versions, the extension, CUDA devices", parents=[as_json],
        examples=["info", "info --json"], exits={0: "the package can run here", 1: "it cannot; `problem` says why"},
    )  # fmt: skip
    parser.set_defaults(run=lambda flags: show_info(as_json=flags.json))
