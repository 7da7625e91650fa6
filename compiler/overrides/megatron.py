"""A tp_comm_overlap_cfg of Megatron / NeMo / TransformerEngine, as rules.

The cfg is a table {"<layer>_<pass>": {"method": ..., ...}}; what each entry overlaps there decides what its rule takes here:

    qkv_fprop, fc1_fprop      all_gather -> matmul                    forward    ring_exchange
    proj_fprop, fc2_fprop     matmul -> reduce_scatter                forward    pipeline, ring_exchange
    proj_dgrad, fc2_dgrad     all_gather of dY -> matmul              backward   ring_exchange
    qkv_dgrad, fc1_dgrad      all_gather of x beside the matmul       backward   bulk  (there is one with save="shard" alone)
                              or matmul -> reduce_scatter of dX       backward   ring_exchange, pipeline
    qkv_wgrad, fc1_wgrad      reduce_scatter of dX beside the matmul  backward   bulk
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..plan.strategy import MAX_CHUNKS
from .rule import Rule, refused

LAYERS: dict[str, tuple[str, ...]] = {
    "qkv": (
        "*.wq",
        "*.wk",
        "*.wv",
        "*.wqkv",
        "*.q_proj",
        "*.k_proj",
        "*.v_proj",
        "*.qkv*",
        "*.linear_qkv",
        "*.query_key_value",
    ),
    "proj": ("*.wo", "*.o_proj", "*.out_proj", "*.linear_proj", "*.attention.dense"),
    "fc1": ("*.w1", "*.w3", "*.gate_proj", "*.up_proj", "*.gate_up_proj", "*.linear_fc1", "*.fc1", "*.dense_h_to_4h"),
    "fc2": ("*.w2", "*.down_proj", "*.linear_fc2", "*.fc2", "*.dense_4h_to_h"),
}
"""How models call the modules that the cfg names: Llama's and torchtitan's, Hugging Face's, Megatron's."""

_GATHER, _SCATTER = "all_gather*", "*reduce_scatter"
_COLUMN, _ROW = ("qkv", "fc1"), ("proj", "fc2")
# (layers, pass) -> method -> kind of the collective; the first method is the reference's default.
_METHODS: dict[tuple[tuple[str, ...], str], dict[str, str]] = {
    (_COLUMN, "fprop"): {"ring_exchange": _GATHER},
    (_ROW, "fprop"): {"pipeline": _SCATTER, "ring_exchange": _SCATTER},
    (_ROW, "dgrad"): {"ring_exchange": _GATHER},
    (_COLUMN, "dgrad"): {"bulk": _GATHER, "ring_exchange": _SCATTER, "pipeline": _SCATTER},
    (_COLUMN, "wgrad"): {"bulk": _SCATTER},
    (_ROW, "wgrad"): {"external": ""},
}
ENTRIES = {f"{layer}_{stage}": methods for (layers, stage), methods in _METHODS.items() for layer in layers}
_DEFAULT_SPLITS = 4
# Fields that change nothing here, and the value at which they do not mean to: pushes take no SM, so there is nothing to share.
_NO_MEANING: dict[str, Any] = {
    "num_sm": None, "cga_size": None, "set_sm_margin": False, "atomic_gemm": False, "fp8_buf": False, "use_ce": True,
    "comm_priority": None, "gemm_priority": None, "pipeline_rs_overlap_first_gemm": False,
}  # fmt: skip


def is_cfg(value: Mapping[Any, Any]) -> bool:
    """Does a dict look like such a cfg: is one of its keys one of theirs?"""
    return any(key in ENTRIES for key in value)


def read_text(path: str | Path, option: str) -> Any:
    """What a JSON or YAML file holds. OptionError where it cannot be read; YAML needs PyYAML, which is not required."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise refused("", "", str(path), "a readable JSON or YAML file", option, fix=str(e)) from e
    try:
        return json.loads(text)
    except ValueError as not_json:
        if Path(path).suffix.lower() not in (".yaml", ".yml"):
            raise refused(str(path), "", _start(text), "JSON", option, fix=str(not_json)) from not_json
    try:
        import yaml
    except ImportError as e:
        raise refused(
            str(path),
            "",
            "a YAML file, and no PyYAML",
            "PyYAML to read it with",
            option,
            fix="pip install pyyaml, or write it as JSON",
        ) from e
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise refused(str(path), "", _start(text), "YAML", option, fix=" ".join(str(e).split())) from e


def _start(text: str) -> str:
    return text[:60] + ("..." if len(text) > 60 else "")


def rules_of(cfg: Mapping[Any, Any], origin: str = "", told: list[str] | None = None) -> tuple[Rule, ...]:
    """The rules that a cfg comes to; sites of entries it does not have stay automatic. What has no meaning here is named in one
    warning, or put into `told`. OptionError where a field cannot be, as the reference refuses it too."""
    rules: list[Rule] = []
    unused: list[str] = []
    for name, entry in cfg.items():
        if name not in ENTRIES:
            unused.append(f"{name} (no entry of this kind)")
        elif not isinstance(entry, Mapping):
            raise refused(origin, str(name), entry, "a table with method, num_splits, aggregate, ...")
        elif (rule := _rule(name, entry, origin, unused)) is not None:
            rules.append(rule)
    if not rules and not unused:
        raise refused(origin, "", dict(cfg), f"some of {', '.join(ENTRIES)}")
    if told is not None:
        told += unused
    elif unused:
        warnings.warn(f"ub_overlap: {origin or 'tp_comm_overlap_cfg'}: without meaning here: {', '.join(unused)}", stacklevel=3)
    return tuple(rules)


def _rule(name: str, entry: Mapping[str, Any], origin: str, unused: list[str]) -> Rule | None:
    methods = ENTRIES[name]
    method = entry.get("method", next(iter(methods)))
    if not isinstance(method, str) or method not in methods:
        raise refused(origin, f"{name}.method", method, " or ".join(map(repr, methods)))
    kind, layer = methods[method], name.partition("_")[0]
    unused += [f"{name}.{f}" for f in entry if _means_something_there(f, entry[f], method)]
    scatters = entry.get("is_reduce_scatter")
    if scatters is not None and bool(scatters) != (kind == _SCATTER):
        here = "1: {} it is a reduce_scatter" if kind == _SCATTER else "0: {} it is an all_gather"
        said = here.format(f"with method {method!r}")
        raise refused(origin, f"{name}.is_reduce_scatter", scatters, said)
    strategy = _strategy(name, entry, method, kind, origin)
    if strategy is None:
        unused.append(f"{name}.method={method}")
        return None
    return Rule(
        strategy=strategy,
        module=LAYERS[layer],
        kind=kind,
        phase="forward" if name.endswith("_fprop") else "backward",
        optional=(method, kind) == ("bulk", _GATHER),
    )


def _means_something_there(field: str, value: Any, method: str) -> bool:
    if field in ("method", "is_reduce_scatter", "aggregate"):
        return False
    if field == "num_splits":
        return method != "pipeline"
    return field not in _NO_MEANING or _NO_MEANING[field] is None or bool(value) != _NO_MEANING[field]


def _strategy(name: str, entry: Mapping[str, Any], method: str, kind: str, origin: str) -> str | None:
    aggregate = entry.get("aggregate", False)
    if aggregate not in (True, False):  # 0 and 1 as well
        raise refused(origin, f"{name}.aggregate", aggregate, "true or false")
    if method == "bulk":
        return "bulk"
    if method == "pipeline":
        splits = entry.get("num_splits", _DEFAULT_SPLITS)
        if not isinstance(splits, int) or isinstance(splits, bool) or not 1 <= splits <= MAX_CHUNKS:
            raise refused(origin, f"{name}.num_splits", splits, f"an integer from 1 to {MAX_CHUNKS}")
        return f"pipelined:stripes={splits}"
    if method == "ring_exchange":
        return "pipelined:chunks=R/2" if aggregate and kind == _GATHER else "pipelined"
    return None


def import_file(path: str | Path) -> tuple[tuple[Rule, ...], list[str]]:
    """(rules, names of what has no meaning here) of a cfg file. OptionError as for the option."""
    cfg = read_text(path, "rules")
    if not isinstance(cfg, Mapping) or not is_cfg(cfg):
        raise OptionError(
            what="this is no tp_comm_overlap_cfg",
            where=f"file {path}",
            got=f"{type(cfg).__name__} of {', '.join(map(str, cfg)) or 'nothing'}"
            if isinstance(cfg, Mapping)
            else repr(cfg)[:80],
            expected=f"a table with some of {', '.join(ENTRIES)}",
        )
    told: list[str] = []
    return rules_of(cfg, str(path), told), told
