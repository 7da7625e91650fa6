// Memory that this process may still allocate.
#pragma once

#include <cstdint>

namespace ub_overlap {

// Bytes that the host has free (with swap) and that this process's cgroups allow; INT64_MAX where neither is known.
// Pages of a memfd have no limit of their own: past these limits the kernel kills a process instead of failing the call.
int64_t free_memory_bytes();

}  // namespace ub_overlap
