"""The ops `torch.ops.ub_overlap.*`, one file per op: schema, argument types, fake and c10d fallback.

    all_gather_matmul, all_gather_scaled_matmul                 a gather whose pieces are multiplied as they arrive
    matmul_reduce_scatter, scaled_matmul_reduce_scatter         a product whose blocks are sent while the next is computed
    matmul_all_reduce                                           the same, reduced to all ranks
    bulk                                                        a collective concurrent with independent matmuls
    start_collective, finish_collective, release_collective     a collective concurrent with everything between them
    start_coalesced, finish_coalesced, release_coalesced        the same of several tensors
    start_all_to_all, finish_all_to_all                         an exchange of pieces of any sizes, likewise in two ops
    fused_collective                                            a collective of few tokens and what follows, as one kernel
    packed_weight                                               weights next to each other in memory as one matrix
    compare                                                     verification
    fp8_amax_history, fp8_first_amax, fp8_record_amax           delayed scaling
    fp8_cached_weight                                           float8 weights that outlive a call
    fp8_packed_casts                                            several of them as one matrix (packed_weight.py)
    fp8_layout_copy                                             a transposed copy that is not fused
    start_host_read, finish_host_read                           numbers for the host, read while the device computes

Every op that overlaps ends with (str strategy, str group, str site); finish_all_to_all has an optional order behind them. C++
implements them (csrc/bindings/ops/).
An op with a list among several results has a second form `<name>_flat`, which returns all of them in one list. Inductor's C++
wrapper (`cpp_wrapper=True`) calls that form.

Importing this package registers the ops. It starts no process group and touches no device; the first call on a group
makes the group's session.
"""

from __future__ import annotations

import atexit
import logging
from typing import Any

import torch

from .. import settings
from ..extension import extension
from ..session import flight, inherited_groups
from ..session.bind import bind
from ..session.site_mismatch import make_error
from . import (
    all_gather_matmul,
    all_gather_scaled_matmul,
    bulk,
    finish_all_to_all,
    finish_coalesced,
    finish_collective,
    fused_collective,
    matmul_all_reduce,
    matmul_reduce_scatter,
    release_coalesced,
    release_collective,
    scaled_matmul_reduce_scatter,
    start_all_to_all,
    start_coalesced,
    start_collective,
)
from . import compare as compare  # registers ub_overlap::compare
from . import fp8_amax_history as fp8_amax_history
from . import fp8_cached_weight as fp8_cached_weight
from . import fp8_first_amax as fp8_first_amax
from . import fp8_layout_copy as fp8_layout_copy
from . import fp8_record_amax as fp8_record_amax
from . import host_read as host_read
from . import packed_weight as packed_weight
from .definition import OpDefinition
from .plain_collective import at_site, fail_plain, wait_on_host
from .schedule_provider import ScheduleProvider

DEFINITIONS: dict[str, OpDefinition[Any]] = {
    definition.name: definition
    for definition in (
        all_gather_matmul.DEFINITION,
        all_gather_scaled_matmul.DEFINITION,
        matmul_reduce_scatter.DEFINITION,
        scaled_matmul_reduce_scatter.DEFINITION,
        matmul_all_reduce.DEFINITION,
        bulk.DEFINITION,
        fused_collective.DEFINITION,
        start_collective.DEFINITION,
        finish_collective.DEFINITION,
        release_collective.DEFINITION,
        start_all_to_all.DEFINITION,
        finish_all_to_all.DEFINITION,
        start_coalesced.DEFINITION,
        finish_coalesced.DEFINITION,
        release_coalesced.DEFINITION,
    )
}
"""The ops that overlap, by name."""

load = extension
"""Return the extension, whose ops importing this package has registered."""


@torch.no_grad()
def run_fallback(op: str, *args: Any) -> Any:
    """Run the fallback of `op` on the arguments of its schema. C++ calls this."""
    definition = DEFINITIONS[op]
    assert definition.fallback is not None, f"{op} has no fallback in Python"
    with at_site(op, args[-1]):
        return definition.fallback(definition.arguments(*args))


def install(provide: Any, bind: Any) -> None:
    """Give C++ the functions that it calls. `provide`: of schedules; `bind`: of sessions."""
    _C.install(
        provide=provide,
        bind=bind,
        fallback=run_fallback,
        make_error=make_error,
        on_error=flight.attach,
        warn=logging.getLogger("ub_overlap").warning,
    )
    _C.install_plain(wait_on_host=wait_on_host, fail_plain=fail_plain)


_C = load()
for _definition in DEFINITIONS.values():
    _definition.register()
install(ScheduleProvider(), bind)
inherited_groups.install(_C)
settings.apply()
# Sessions hold Python objects, so they must be closed while the interpreter lives.
atexit.register(_C.close_all)
