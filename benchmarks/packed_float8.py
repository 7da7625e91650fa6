"""Predict what packed operands save in the forward of a Llama block in float8, by rows' scales. It needs no GPU.

    python -m benchmarks.packed_float8 [--profile h200,h100] [--tokens 8192]

Both gathers of a block (q, k, v and w1, w3), apart against packed where pack="auto" packs. "cached": casts of the weight cache,
which lie next to each other. "joined": operands that are copied into one matrix in each forward (`"weights": "per_call"`).
`torchrun ... -m benchmarks.blocks --ours` measures both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from ub_overlap.compiler.cost import SiteShape, choose, load
from ub_overlap.compiler.cost.choice import margin_us
from ub_overlap.compiler.cost.profile import Profile

from .blocks.model import SIZES

COPIES = {"cached": "", "joined": "rhs"}


def saved_us(shape: SiteShape, copies: str, profile: Profile) -> float:
    """Return the microseconds that one matmul saves against `shape`; 0 where that is less than the margin."""
    apart = choose(shape, profile)
    one = choose(replace(shape, packs=(len(shape.matmuls),), pack_copies=(copies,)), profile)
    plain = apart.predictions["none"]
    saved = one.gain_us - apart.gain_us
    return saved if saved > margin_us(plain.us - apart.gain_us, plain) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h200,h100")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    print("profile  size  tp  " + "  ".join(f"{name} us" for name in COPIES))
    for profile in map(load, args.profile.split(",")):
        for size in ("8b", "70b"):
            sizes = SIZES[size]
            keys = sizes.head_dim * sizes.kv_heads
            for ranks in (2, 4, 8):
                saved = dict.fromkeys(COPIES, 0.0)
                for widths in ((sizes.dim, keys, keys), (sizes.wide, sizes.wide)):
                    matmuls = tuple((args.tokens, n // ranks, sizes.dim, False) for n in widths)
                    shape = SiteShape("all_gather_matmul", ranks, "float8", matmuls, args.tokens, sizes.dim, keep=True)
                    for name, copies in COPIES.items():
                        saved[name] += saved_us(shape, copies, profile)
                numbers = "  ".join(f"{us:{len(name) + 3}.0f}" for name, us in saved.items())
                print(f"{profile.name:7}  {size:>4}  {ranks:2}  {numbers}")


if __name__ == "__main__":
    main()
