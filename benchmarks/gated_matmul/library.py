"""Build the CUTLASS kernels of this folder with nvcc and call them on torch tensors."""

from __future__ import annotations

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
    "-Xcompiler",
    "-fPIC",
)
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Instance:
    """Compile-time choices of a kernel: tile, cluster, schedule, stream-K or not."""

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool = False
    stream_k: bool = False

    @property
    def name(self) -> str:
        kind = ("stream" if self.stream_k else "coop") if not self.pingpong else "ping"
        return f"{kind}_{self.tile[0]}x{self.tile[1]}_{self.cluster[0]}x{self.cluster[1]}"

    def defines(self) -> list[str]:
        values = {"NAME": self.name, "TM": self.tile[0], "TN": self.tile[1], "CM": self.cluster[0], "CN": self.cluster[1]}
        switches = ["-DPINGPONG"] * self.pingpong + ["-DSTREAM_K"] * self.stream_k
        return [f"-D{key}={value}" for key, value in values.items()] + switches


INSTANCES = (
    Instance((128, 256), (2, 1)),
    Instance((128, 256), (1, 2)),
    Instance((256, 128), (2, 1)),
    Instance((256, 128), (1, 2)),
    Instance((256, 192), (2, 1)),
    Instance((128, 224), (2, 1)),
    Instance((128, 192), (2, 1)),
    Instance((128, 128), (2, 1)),
    Instance((128, 128), (2, 1), pingpong=True),
    Instance((128, 128), (1, 2), pingpong=True),
    Instance((128, 192), (2, 1), pingpong=True),
    Instance((128, 192), (1, 2), pingpong=True),
    Instance((64, 256), (2, 1), pingpong=True),
    Instance((128, 256), (2, 1), stream_k=True),
    Instance((256, 128), (2, 1), stream_k=True),
)


class Launch(ctypes.Structure):
    """Arguments of one launch, as in kernel.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "out", "flags", "late", "done", "workspace")]
    _fields_ += [("workspace_bytes", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_int32) for name in ("rows", "n", "k", "shards", "along_n", "swizzle")]
    _fields_ += [("stream", ctypes.c_void_p)]


@dataclass(frozen=True)
class Order:
    """The order of a shard's tiles."""

    along_n: bool
    swizzle: int


ORDERS = tuple(Order(along_n, swizzle) for along_n in (False, True) for swizzle in (1, 2, 8))


def build(cutlass: str, target: Path, jobs: int | None = None) -> list[str]:
    """Compile all instances into the shared library `target`. Returns the names of those that did not compile."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{cutlass}/include", f"-I{cutlass}/tools/util/include"]

    def compile_one(instance: Instance | None) -> bool:
        source = "instance.cu" if instance else "arrival.cu"
        out = folder / f"{instance.name if instance else 'arrival'}.o"
        defines = instance.defines() if instance else []
        command = ["nvcc", *FLAGS, *includes, *defines, "-c", str(HERE / source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (folder / f"{out.stem}.log").write_text(done.stdout + done.stderr)
        return done.returncode == 0

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        built = list(pool.map(compile_one, (None, *INSTANCES)))
    if not built[0]:
        raise RuntimeError((folder / "arrival.log").read_text())
    objects = [folder / "arrival.o", *(folder / f"{x.name}.o" for x, done in zip(INSTANCES, built[1:], strict=True) if done)]
    subprocess.run(["nvcc", "-shared", "-o", str(target), *map(str, objects)], check=True)
    return [x.name for x, done in zip(INSTANCES, built[1:], strict=True) if not done]


class KernelLibrary:
    """The compiled kernels, on the current device."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        self.instances = [x for x in INSTANCES if hasattr(self._functions, f"run_{x.name}")]
        self.late = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def matmul(
        self,
        x: Instance,
        order: Order,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        shards: int,
        flags: Tensor | None = None,
        done: Tensor | None = None,
    ) -> bool:
        """Enqueue out = a @ b.T on the current stream, shard by shard. False if the kernel refuses the shape.

        flags: one of each shard, awaited. done: one of each shard, counts its stored tiles.
        """
        launch = Launch(
            a=a.data_ptr(),
            b=b.data_ptr(),
            out=out.data_ptr(),
            flags=None if flags is None else flags.data_ptr(),
            late=self.late.data_ptr(),
            done=None if done is None else done.data_ptr(),
            workspace=self._workspace.data_ptr(),
            workspace_bytes=WORKSPACE_BYTES,
            rows=a.shape[0] // shards,
            n=b.shape[0],
            k=b.shape[1],
            shards=shards,
            along_n=order.along_n,
            swizzle=order.swizzle,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        return getattr(self._functions, f"run_{x.name}")(ctypes.byref(launch)) == 0

    def wait_count(self, count: Tensor, least: int) -> None:
        """Let the current stream wait, without a kernel, until `count` is `least` or more."""
        self._check(_driver().cuStreamWaitValue32_v2(_stream(), ctypes.c_uint64(count.data_ptr()), ctypes.c_uint32(least), 0))

    def wait(self, flag: Tensor) -> None:
        """Enqueue a kernel that ends once `flag` is not zero."""
        self._check(self._functions.wait_flag(_pointer(flag), _pointer(self.late), _stream()))

    def copy(self, to: Tensor, source: Tensor) -> None:
        self._check(self._functions.copy(_pointer(to), _pointer(source), ctypes.c_size_t(source.nbytes), _stream()))

    def fill(self, to: Tensor, byte: int) -> None:
        self._check(self._functions.fill(_pointer(to), byte, ctypes.c_size_t(to.nbytes), _stream()))

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
