"""The page of ops: their schemas and the docstrings of their modules."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Any

import torch

from ub_overlap.runtime import ops

STRATEGIES = """## strategy, group, site

| strategy | what runs |
| --- | --- |
| `none` | the plain collective and the matmuls |
| `pipelined`, `pipelined:chunks=N` | N pieces of the gathered or scattered dim; default one per rank |
| `pipelined:stripes=N` | scattered or reduced products: each matmul computes the N-th part of every rank's shard |
| `pipelined:copies=engine` | gathers: the driver copies the gathered tensor that is returned; also after `:chunks=N` |
| `direct` | scattered or reduced products: one matmul stores each shard at its owner (see below) |
| `bulk`, `bulk:chunks=N` | the collective concurrent with independent matmuls |
| `1024=none;*=pipelined` | selected by the rows of the full matrix; for bulk, all dims but the last of the full tensor |
| `pipelined\\|none` | selected by measurement at the site's first call |

A call with `direct` runs as `pipelined` if it sums several products, scatters the last dim, has float8 operands or returns
`partial`.

`group` is the c10d group name. `site` is "<plan digest>/<site id>", e.g. "9f2c0a1b77de4410/backward.3".

All matmuls are 2D. Operands may have any strides: transposed weights are permuted views. No output aliases an input. The ops
support fp32, bf16 and fp16; scaled ops support float8. What happens at a call: [schedules](../explanation/schedules.md).
"""


def ops_page() -> str:
    """Return the page of all ops of torch.ops.ub_overlap."""
    parts = [f"## {module.__name__.rpartition('.')[2]}\n\n{module_text(module)}" for module in op_modules()]
    return "\n".join(["# Ops", "", docstring_as_markdown(inspect.getdoc(ops) or ""), "", "\n\n".join([*parts, STRATEGIES])])


def op_modules() -> list[ModuleType]:
    """Return the modules of runtime/ops that define ops, by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(ops.__path__))
    modules = [importlib.import_module(f"{ops.__name__}.{name}") for name in names]
    return [module for module in modules if schemas_of(module)]


def schemas_of(module: ModuleType) -> list[str]:
    """Return the schemas of the ops that a module defines, in the order of its source."""
    source = inspect.getsource(module)
    stem = module.__name__.rpartition(".")[2]
    names = [stem, *re.findall(r"ub_overlap::(\w+)", source), *re.findall(r'define\(\s*f?"(\w+)\(', source)]
    return [schema for name in dict.fromkeys(names) if (schema := schema_of(name))]


def schema_of(name: str) -> str:
    """Return the schema of an op without its namespace, "" if there is no such op."""
    packet: Any = getattr(torch.ops.ub_overlap, name, None)
    if packet is None or not packet.overloads():
        return ""
    return str(packet.default._schema).removeprefix("ub_overlap::")


def module_text(module: ModuleType) -> str:
    """Return schemas and docstring of a module as Markdown. A schema that the docstring shows is not repeated."""
    text = inspect.getdoc(module) or ""
    stem = module.__name__.rpartition(".")[2]
    if text.startswith(f"{stem}: "):
        text = text[len(stem) + 2 :]
        text = text[0].upper() + text[1:]
    schemas = [schema for schema in schemas_of(module) if f"    {schema.partition('(')[0]}(" not in text]
    block = "\n".join(f"    {line}" for schema in schemas for line in wrap_schema(schema))
    return "\n\n".join(filter(None, (block, docstring_as_markdown(text))))


def wrap_schema(schema: str, width: int = 116) -> list[str]:
    """Return a schema in lines, broken between arguments."""
    indent = " " * (schema.index("(") + 1)
    lines = [""]
    for part in re.split(r"(?<=, )|(?= -> )", schema):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append(indent)
        lines[-1] += part if lines[-1].strip() else part.lstrip()
    return lines


def docstring_as_markdown(text: str) -> str:
    """Return a docstring as Markdown: paragraphs and points on one line each, indented blocks as they are."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if not all(line.startswith("    ") for line in lines if line):
            lines = re.split(r"\n(?=- )", "\n".join(line.strip() for line in lines))
            lines = [" ".join(line.split("\n")) for line in lines]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
