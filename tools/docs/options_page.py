"""The pages of options and settings, from their typed fields."""

from __future__ import annotations

from ub_overlap.compiler.fp8_config import describe_fp8
from ub_overlap.compiler.options import RENAMED, describe_options
from ub_overlap.runtime.settings import describe_settings
from ub_overlap.runtime.typed_fields import markdown_table

VARIABLES = (
    (
        "`UB_OVERLAP_CACHE_DIR`",
        "`~/.cache/ub_overlap`",
        "folder of plans, tuning results, flight records and profiles; `clear-cache` removes them, profiles with `--profiles`",
    ),
    (
        "`UB_OVERLAP_ENABLE`",
        "`0`",
        '`1`, options as a JSON object, or a file with one (`"fsdp": true` too): `ub_overlap.enable` when torch is imported',
    ),
    ("`UB_OVERLAP_DISABLE`", "", "patterns of sites that are left alone, e.g. `forward.3,backward.*`; wins over all overrides"),
    ("`UB_OVERLAP_DEBUG`", "`0`", "`1` shows the traceback of an error of the command line"),
    ("`UB_OVERLAP_BUILD`", "`1`", "at build time: `0` builds no extension, for machines that only look at graphs"),
    ("`UB_OVERLAP_BUILD_CUDA`", "`auto`", "at build time: `auto`, `0`, or `1` (fail if CUDA cannot be built)"),
    ("`UB_OVERLAP_LOCAL_VERSION`", "", "at build time: local version of the wheel, e.g. `torch2.13.cpu`"),
    ("`TORCH_LOGS=+ub_overlap`", "", "INFO: one line per graph; DEBUG: every decision"),
    ("`TORCH_TRACE`", "", "artifacts `ub_overlap_plan_*`, `ub_overlap_reasons_*`, `ub_overlap_diff_*`, per phase"),
)
"""Variables that are not settings: read where they are needed, or by torch."""


def options_page() -> str:
    """Return the page of the options of torch.compile."""
    options = [(f"`{name}`", values, meaning) for name, values, meaning in describe_options()]
    fp8 = [(f"`{name}`", values, meaning) for name, values, meaning in describe_fp8()]
    renamed = [(f"`{old}`", f"`{new.format(value='...')}`") for old, new in RENAMED.items()]
    return f"""# Options

`torch.compile(model, backend="ub_overlap", options={{...}})`. Other names are options of Inductor and pass through.

{markdown_table(("option", "values (default first)", "meaning"), options)}

Strategies and the forms of `overrides`: [overriding_strategies.md](../guide/overriding_strategies.md).

## fp8

`fp8` is a string, a dict of these fields, or `ub_overlap.Fp8Config`. The guide is [float8.md](../guide/float8.md).

{markdown_table(("field", "values (default first)", "meaning"), fp8)}

## Names of earlier versions

They raise an OptionError with the new spelling.

{markdown_table(("before", "now"), renamed)}
"""


def environment_page() -> str:
    """Return the page of the settings of the process and of environment variables."""
    settings = [(f"`{name}`", f"`{variable}`", f"`{default}`", doc) for name, variable, default, doc in describe_settings()]
    return f"""# Settings and environment

Settings belong to the process. Set the environment variable before the start, or call `ub_overlap.configure(name=value)`.

{markdown_table(("setting", "variable", "default", "meaning"), settings)}

## Other variables

{markdown_table(("variable", "default", "meaning"), VARIABLES)}
"""
