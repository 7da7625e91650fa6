"""A column/row-parallel MLP through ub_overlap: torchrun --nproc-per-node 2 examples/tp_mlp.py"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ub_overlap

mesh = init_device_mesh("cpu", (2,))
mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
mlp = torch.compile(parallelize_module(mlp, mesh, plan), backend="ub_overlap", options={"overlap": "force"})
mlp(torch.randn(128, 512)).sum().backward()
print(ub_overlap.reports() if mesh.get_rank() == 0 else "")
