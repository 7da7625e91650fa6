"""Load the compiled extension, and check that it fits the running torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import errors

_REBUILD = "reinstall ub_overlap in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."


def check_build(info: Mapping[str, Any], torch_version: str) -> None:
    """Raise BuildMismatchError unless the extension was compiled for this torch: C++ layouts change between versions."""
    if info["torch"] != torch_version:
        raise errors.BuildMismatchError(
            "the compiled part of ub_overlap was built for another torch",
            where="ub_overlap._C",
            got=f"torch {torch_version}",
            expected=f"torch {info['torch']}",
            fix=_REBUILD,
        )


def cuda_note() -> str:
    """Return why CUDA is or is not part of the extension, as setup.py recorded it. BuildMismatchError without an extension."""
    record = Path(str(extension().__file__)).resolve().with_name("_C_build.json")
    try:
        return str(json.loads(record.read_text())["cuda_note"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"no record of the build in {record}"


if TYPE_CHECKING:
    from ub_overlap import _C

    def extension():  # a module's type has no name: checkers infer it, and with it src/ub_overlap/_C.pyi
        return _C

else:

    def extension():
        """Return the extension module. Raise BuildMismatchError where it is missing or does not fit the running torch."""
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
