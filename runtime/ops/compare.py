"""compare: record how far an overlapped result is from the plain one; `options={"verify": True}` puts it behind every site.

    compare(Tensor ours, Tensor plain, str site, bool float8=False) -> Tensor

`ours` and `plain` have the same shape, which is any. The result is a copy of `ours`. Errors stay on the device until
`runtime/verify.py` reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import verify


@torch.library.custom_op("ub_overlap::compare", mutates_args=())
def compare(ours: Tensor, plain: Tensor, site: str, float8: bool = False) -> Tensor:
    """Record the error of `ours` against `plain` and return a copy of `ours`.

    `float8`: `ours` is a float8 product, `plain` the same product in 16 bits, and `site` its `CastDecision.key`.
    """
    (verify.FLOAT8 if float8 else verify.ERRORS).add(site, ours, plain)
    return ours.clone()


@compare.register_fake
def fake(ours: Tensor, plain: Tensor, site: str, float8: bool = False) -> Tensor:
    return ours.clone()
