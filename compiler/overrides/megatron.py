"""A tp_comm_overlap_cfg of Megatron / NeMo / TransformerEngine, as rules.

The cfg is a table {"<layer>_<pass>": {"method": ..., ...}}. An entry's rule matches the sites that the entry overlaps there:

    qkv_fprop, fc1_fprop      all_gather -> matmul                    forward    ring_exchange
    proj_fprop, fc2_fprop     matmul -> reduce_scatter                forward    pipeline, ring_exchange
    proj_dgrad, fc2_dgrad     all_gather of dY -> matmul              backward   ring_exchange
    qkv_dgrad, fc1_dgrad      all_gather of x, concurrent matmul      backward   bulk  (exists with memory_budget=0 only)
                              or matmul -> reduce_scatter of dX       backward   ring_exchange, pipeline
    qkv_wgrad, fc1_wgrad      reduce_scatter of dX, concurrent matmul backward   bulk
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..plan.strategy import MAX_CHUNKS
from .option_file import read_option_file, refused
from .rule import Rule

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
"""Module names of the layers in Llama and torchtitan, Hugging Face and Megatron models."""

_GATHER, _SCATTER = "all_gather*", "*reduce_scatter"
_COLUMN, _ROW = ("qkv", "fc1"), ("proj", "fc2")
# (layers, pass) -> method -> kind of the collective; the first method is TransformerEngine's default.
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
# Fields without effect here, and their neutral values. Our pushes use no SM, so there are no SMs to share.
_WITHOUT_EFFECT: dict[str, Any] = {
    "num_sm": None, "cga_size": None, "set_sm_margin": False, "atomic_gemm": False, "fp8_buf": False, "use_ce": True,
    "comm_priority": None, "gemm_priority": None, "pipeline_rs_overlap_first_gemm": False,
}  # fmt: skip


def is_tp_comm_overlap_cfg(value: Mapping[Any, Any]) -> bool:
    """Return whether a key of the dict is an entry of such a cfg."""
    return any(key in ENTRIES for key in value)


def rules_of_cfg(cfg: Mapping[Any, Any], origin: str = "", ignored: list[str] | None = None) -> tuple[Rule, ...]:
    """Return the rules of a cfg; sites without an entry stay automatic.

    Fields without effect here are appended to `ignored`, or named in one warning. OptionError for an invalid field.
    """
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
    if ignored is not None:
        ignored += unused
    elif unused:
        warnings.warn(f"ub_overlap: {origin or 'tp_comm_overlap_cfg'}: without effect here: {', '.join(unused)}", stacklevel=3)
    return tuple(rules)


def _rule(name: str, entry: Mapping[str, Any], origin: str, unused: list[str]) -> Rule | None:
    methods = ENTRIES[name]
    method = entry.get("method", next(iter(methods)))
    if not isinstance(method, str) or method not in methods:
        raise refused(origin, f"{name}.method", method, " or ".join(map(repr, methods)))
    kind, layer = methods[method], name.partition("_")[0]
    unused += [f"{name}.{f}" for f in entry if _has_effect_there(f, entry[f], method)]
    scatters = entry.get("is_reduce_scatter")
    if scatters is not None and bool(scatters) != (kind == _SCATTER):
        number, collective = (1, "a reduce_scatter") if kind == _SCATTER else (0, "an all_gather")
        expected = f"{number}: with method {method!r} it is {collective}"
        raise refused(origin, f"{name}.is_reduce_scatter", scatters, expected)
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
        place=f"{Path(origin).name}: {name}" if origin else name,
    )


def _has_effect_there(field: str, value: Any, method: str) -> bool:
    if field in ("method", "is_reduce_scatter", "aggregate"):
        return False
    if field == "num_splits":
        return method != "pipeline"
    return field not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[field] is None or bool(value) != _WITHOUT_EFFECT[field]


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
    """Return (rules, names of fields without effect here) of a cfg file. OptionError as for the option."""
    cfg = read_option_file(path)
    if not isinstance(cfg, Mapping) or not is_tp_comm_overlap_cfg(cfg):
        raise OptionError(
            what="not a tp_comm_overlap_cfg",
            where=f"file {path}",
            got=f"{type(cfg).__name__} of {', '.join(map(str, cfg)) or 'nothing'}"
            if isinstance(cfg, Mapping)
            else repr(cfg)[:80],
            expected=f"a table with some of {', '.join(ENTRIES)}",
        )
    ignored: list[str] = []
    return rules_of_cfg(cfg, str(path), ignored), ignored
