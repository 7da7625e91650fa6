"""Cases by name: (module, variant). Tests are parametrised over these, so each model is listed once."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.forms import FORMS

Named = dict[str, tuple[str, dict[str, Any]]]

_LLAMA, _MLP = "tests.models.dtensor_llama", "tests.models.dtensor_mlp"
_MEGATRON, _FSDP = "tests.models.megatron", "tests.models.fsdp"
_HF, _TITAN = "tests.models.hf_llama", "tests.models.torchtitan_llama"

DTENSOR: Named = {
    "llama_b2": (_LLAMA, {}),
    "llama_b1": (_LLAMA, {"batch": 1}),
    "llama_bias_b2": (_LLAMA, {"bias": True}),
    "llama_bias_b1": (_LLAMA, {"bias": True, "batch": 1}),
    "llama_gqa_two_blocks": (_LLAMA, {"kv_heads": 4, "layers": 2}),
    "llama_dynamic": (_LLAMA, {"dynamic": True}),
    "llama_each_b2": (_LLAMA, {"each": True}),
    "llama_each_b1": (_LLAMA, {"each": True, "batch": 1, "kv_heads": 4, "bias": True}),
    "llama_logits": (_LLAMA, {"head": "logits"}),
    "llama_loss": (_LLAMA, {"head": "loss"}),
    "llama_loss_parallel": (_LLAMA, {"head": "loss_parallel"}),
    "llama_reduce": (_LLAMA, {"sequence": False}),
    "llama_reduce_loss_parallel": (_LLAMA, {"sequence": False, "head": "loss_parallel"}),
    "mlp": (_MLP, {}),
    "mlp_along0": (_MLP, {"along": 0, "batch": 8}),
    "mlp_uneven": (_MLP, {"length": 17}),
    "mlp_uneven_b1": (_MLP, {"length": 17, "batch": 1}),
}

MEGATRON: Named = {
    "mlp_2d": (_MEGATRON, {"dims": 2}),
    "mlp_dim0": (_MEGATRON, {}),
    "mlp_dim1": (_MEGATRON, {"gather_dim": 1}),
    "mlp_dim1_b1": (_MEGATRON, {"gather_dim": 1, "batch": 1}),
    "mlp_gated_bias": (_MEGATRON, {"gated": True, "bias": True}),
    "mlp_function_gated": (_MEGATRON, {"gated": True, "style": "function"}),
    "mlp_function_gated_dim1": (_MEGATRON, {"gated": True, "style": "function", "gather_dim": 1}),
    "mlp_reduce_gated": (_MEGATRON, {"gated": True, "style": "reduce"}),
    "mlp_dynamic_dim0": (_MEGATRON, {"dynamic": True}),
    "mlp_dynamic_dim1": (_MEGATRON, {"dynamic": True, "gather_dim": 1}),
    "attention": (_MEGATRON, {"part": "attention"}),
    "attention_dim1_bias": (_MEGATRON, {"part": "attention", "gather_dim": 1, "bias": True}),
    "layers": (_MEGATRON, {"part": "layer", "layers": 2, "bias": True}),
}

FSDP: Named = {
    "fsdp_2d": (_FSDP, {}),
    "fsdp_3d": (_FSDP, {"dims": 3}),
    "fsdp_mixed_2d": (_FSDP, {"mixed": True}),
    "fsdp_mixed_3d": (_FSDP, {"mixed": True, "dims": 3}),
}

MESH: Named = {  # four ranks, tensor parallelism over {0, 2} and {1, 3}
    "llama_mesh": (_LLAMA, {"two_dims": True}),
    "llama_mesh_reduce": (_LLAMA, {"two_dims": True, "sequence": False}),
    "mlp_mesh": (_MLP, {"two_dims": True}),
}

EXTERNAL: Named = {
    "hf": (_HF, {}),
    "hf_gqa_bias": (_HF, {"kv_heads": 4, "bias": True, "layers": 2}),
    "titan": (_TITAN, {}),
    "titan_split_qkv_b1": (_TITAN, {"fuse_qkv": False, "batch": 1}),
    "titan_spmd_types": (_TITAN, {"spmd": "spmd_types"}),
    "titan_spmd_types_gqa": (_TITAN, {"spmd": "spmd_types", "kv_heads": 4, "layers": 2}),
    "titan_spmd_types_reduce": (_TITAN, {"spmd": "spmd_types", "sequence": False}),
    "titan_whole": (_TITAN, {"whole": True}),
}

REPEATED = {
    "llama_b1", "llama_bias_b2", "llama_bias_b1", "llama_gqa_two_blocks", "llama_dynamic", "llama_each_b2", "llama_logits",
    "llama_loss", "llama_loss_parallel", "llama_reduce_loss_parallel", "layers",
}  # fmt: skip
"""Models whose numbers are those of the ops of others. Their structure is checked in one process."""

# Cases that a supported torch version cannot run or trace without this package: name -> (first version that can, why).
NEEDS: dict[str, tuple[tuple[int, int], str]] = {
    "mlp_uneven": ((2, 12), "eager DTensor: F.linear takes no view of an uneven shard"),
    "mlp_function_gated_dim1": ((2, 12), "Dynamo breaks the graph at the autograd.Function"),
    "mm_scatter_avg": ((2, 12), "reduce_scatter_tensor_autograd takes sum only"),
}


def unfit(name: str) -> str:
    """Return why the installed torch cannot run or trace this case, or "" if it can."""
    first, why = NEEDS.get(name, ((0, 0), ""))
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return f"torch {torch.__version__}: {why}" if version < first else ""


SINGLE: Named = {name: ("tests.models.forms", {"name": name}) for name in FORMS}


def joined(*parts: Named) -> Named:
    """Return the models of all parts. ValueError for a name in two of them: one would hide the other."""
    names = [name for part in parts for name in part]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names of two models: {', '.join(sorted(twice))}")
    return {name: entry for part in parts for name, entry in part.items()}


MODELS: Named = joined(DTENSOR, MEGATRON, FSDP)
ALL: Named = joined(MODELS, SINGLE)

# For 3, 5, 6 and 7 ranks, which do not divide the heads and widths of any model.
ODD = (
    "mlp_2d",
    "gather_mm",
    "gather_linear_3d_dim1",
    "gather_contracted",
    "linear_scatter_dim1",
    "mm_reduce",
    "two_mm_scatter",
)
