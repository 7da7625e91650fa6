"""torchtitan's Llama 3, parallelised by torchtitan's own parallelize code, on CPU ranks.

torchtitan imports Triton kernels, loggers and data sets that are not called here; missing ones are mocked during the import.
Its default device is patched to the case's. Requires the packages of tests/models/requirements.txt.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from tests.models.absent import stand_ins
from tests.models.case import Case, Expected, Sites, device

UNUSED = ("triton", "tensorboard", "datasets", "torch_checkpointing", "wandb", "torchdata")


@functools.cache
def package() -> SimpleNamespace:
    """Return the torchtitan names from which the model is built."""
    import torch._inductor.compile_fx  # noqa: F401  (before the stand-ins: Inductor looks for Triton itself)
    from torch._subclasses.fake_tensor import FakeTensorMode

    init = FakeTensorMode.__init__
    with stand_ins(*UNUSED):
        from torchtitan import config, distributed
        from torchtitan.distributed import context_parallel, parallel_dims, utils
        from torchtitan.models import common, llama3
        from torchtitan.models.common import attention
        from torchtitan.models.llama3 import sharding
    FakeTensorMode.__init__ = init  # torchtitan patches it for the whole process
    parallel_dims.device_type = device().type
    return SimpleNamespace(
        CompileConfig=config.CompileConfig,
        ParallelismConfig=config.ParallelismConfig,
        TrainingConfig=config.TrainingConfig,
        ParallelDims=distributed.ParallelDims,
        apply_cp_to_forward=context_parallel.apply_cp_to_forward,
        prepare_context_parallel_input=context_parallel.prepare_context_parallel_input,
        get_spmd_context=utils.get_spmd_context,
        set_spmd_backend=utils.set_spmd_backend,
        llama3=llama3,
        ComplexRoPE=common.ComplexRoPE,
        Embedding=common.Embedding,
        Linear=common.Linear,
        RMSNorm=common.RMSNorm,
        ScaledDotProductAttention=attention.ScaledDotProductAttention,
        set_llama3_sharding_config=sharding.set_llama3_sharding_config,
    )


def configuration(titan: SimpleNamespace, layers: int, kv_heads: int, fuse_qkv: bool) -> Any:
    """Return a tiny Llama 3 config in the form of torchtitan's debug model."""
    llama3, dim, vocab, heads = titan.llama3, 64, 160, 8
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=titan.Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT),
        norm=titan.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=titan.Linear.Config(in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=96,
            fuse_qkv=fuse_qkv,
            rope=titan.ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=500000, scaling="llama"),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:  # the torchtitan kernel that runs on CPU; its builder has only flex and varlen
        layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
    return config


def sites(layers: int, sequence: bool, whole: bool) -> Expected:
    """Return the expected sites.

    Sequence-parallel blocks are as in dtensor_llama. The embedding's sum is scattered without a matmul (its gradient gathered);
    the final norm's output is gathered into the head, whose logits stay sharded. FSDP's hooks cut the graph between that gather
    and the head. Without sequence parallelism, each region has one all_reduce per direction, because q k v share theirs; the
    embedding's all_reduce has no matmul.
    """
    inner = 2 * layers
    if not sequence:
        return Expected(Sites(reduce=inner, plain_reduce=1), Sites(reduce=inner + 1))
    if whole:
        forward = Sites(gather=inner, scatter=inner, plain_scatter=1, plain_gather=1)
        return Expected(forward, Sites(gather=inner, scatter=inner, contracted=inner, plain_gather=1))
    forward = Sites(gather=inner + 1, scatter=inner, plain_scatter=1)
    return Expected(forward, Sites(gather=inner, scatter=inner + 1, contracted=inner, plain_gather=1))


def build(
    rank: int,
    world: int,
    layers: int = 1,
    batch: int = 2,
    kv_heads: int = 8,
    fuse_qkv: bool = True,
    sequence: bool = True,
    spmd: str = "partial_dtensor",
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build the model.

    `spmd`: torchtitan's spmd_backend. `whole`: all of parallelize_llama, including FSDP2 over one rank and its hooks; else only
    its tensor parallelism (Module.parallelize). `sequence=False` requires spmd="spmd_types", because the DTensor form regathers
    saved activations.
    """
    titan = package()
    parallelism = titan.ParallelismConfig(tensor_parallel_degree=world, enable_sequence_parallel=sequence, spmd_backend=spmd)
    titan.set_spmd_backend(spmd)
    dims = titan.ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    config = configuration(titan, layers, kv_heads, fuse_qkv)
    titan.set_llama3_sharding_config(config, enable_sp=sequence)  # as in Config.update_from_config, without the trainer
    torch.manual_seed(7)
    model: Any = config.build()
    model.init_states()
    model.to(device())
    for parameter in model.parameters():  # not module.to(): the rotary table is complex
        parameter.data = parameter.data.to(dtype).to(torch.float64 if exact else dtype)
    if whole:
        titan.llama3.parallelize_llama(
            model,
            parallel_dims=dims,
            training=titan.TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=titan.CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    else:
        model.parallelize(dims)
    tokens = torch.randint(160, (batch, 16), generator=torch.Generator().manual_seed(11)).to(device())
    return Case(
        model, (tokens,), sites(layers, sequence, whole), dynamic=dynamic, context=titan.get_spmd_context(parallel_dims=dims)
    )
