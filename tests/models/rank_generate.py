"""Greedy generation of transformers' Llama, tensor parallel by its own plan, with its collectives as one kernel each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ub_overlap
from tests.compiler.rank_siblings import groups_found
from tests.models import hf_llama
from tests.models.case import device
from tests.models.compare import uncached
from ub_overlap.compiler.reports.history import HISTORY

PROMPT, VOCABULARY = 6, 160


def generate(model: Any, prompt: Tensor, cache: str, count: int, options: dict[str, Any] | None = None) -> list[list[int]]:
    """Return the `count` tokens that follow each prompt. `cache`: "static" or "dynamic".

    `options`: of our backend, with which transformers compiles the decode step of a static cache; None: it compiles nothing.
    """
    how: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    if options is not None:
        from transformers import CompileConfig  # not above: torchtitan cannot be imported after transformers

        how["compile_config"] = CompileConfig(backend="ub_overlap", mode=None, options=options)
        how["compile_config"]._compile_all_devices = True
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=None, disable_compile=options is None, **how,
        )  # fmt: skip
    return out[:, PROMPT:].tolist()


def run(rank: int, world: int, batches: dict[str, int], count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Generate without and with our backend. `batches`: by cache.

    With a static cache transformers compiles the decode step alone: a prompt that is compiled would create the cache inside
    of the graph. With a dynamic cache the prompt and the decode step are compiled here.

    Return by cache the tokens of both, the (kind, strategy) of each collective of each graph, and the groups of matmuls that
    are one: the weights of q, k, v and of gate, up lie next to each other.
    """
    model = hf_llama.load(world, 2, 4, torch.float32, False).to(device()).eval()
    ub_overlap.pack(model)
    plain, found = model.forward, {}
    for cache, batch in batches.items():
        torch._dynamo.reset()
        prompt = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).to(device())
        model.forward = plain
        expected = generate(model, prompt, cache, count)
        mark = HISTORY.mark()
        if cache != "static":
            model.forward = torch.compile(plain, backend="ub_overlap", options=options)
        with uncached(), groups_found() as groups:
            tokens = generate(model, prompt, cache, count, options if cache == "static" else None)
        graphs = [[(d.kind.value, str(d.strategy), d.detail) for d in p.decisions] for p in HISTORY.since(mark)]
        found[cache] = {"expected": expected, "tokens": tokens, "graphs": graphs, "groups": groups}
    return found
