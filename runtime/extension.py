"""The compiled part of ub_overlap: found, checked against the torch that runs, loaded once."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from . import errors

_REBUILD = "reinstall ub_overlap in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."


def check_build(info: dict[str, Any], torch_version: str) -> None:
    """BuildMismatchError unless the extension was compiled against the torch that runs: C++ layouts change between them."""
    if info["torch"] != torch_version:
        raise errors.BuildMismatchError(
            "the compiled part of ub_overlap was built for another torch",
            where="ub_overlap._C",
            got=f"torch {torch_version}",
            expected=f"torch {info['torch']}",
            fix=_REBUILD,
        )


def extension() -> Any:
    """The extension module. BuildMismatchError where it is missing or does not fit the torch that runs."""
    name = "ub_overlap._C"
    spec = importlib.util.find_spec(name)
    if spec is None:
        what = "the compiled part of ub_overlap is missing"
        raise errors.BuildMismatchError(what, where=name, got="no such module", fix=_REBUILD)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise errors.BuildMismatchError(
            "the compiled part of ub_overlap cannot be loaded",
            where=name,
            got=str(error),
            expected=f"an extension built for torch {torch.__version__}",
            fix=_REBUILD,
        ) from error
    check_build(module.build_info(), torch.__version__)
    return module
