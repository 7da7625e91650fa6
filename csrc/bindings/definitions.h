// Parts of the module ub_overlap._C that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace ub_overlap {

// Chosen algorithms of matmuls, and what a search for them needs.
void define_matmul_algorithms(pybind11::module_& m);
// What Python does for split collectives that c10d runs.
void define_plain_hooks(pybind11::module_& m);
// Channels and their messages. After the classes of arenas and sessions.
void define_point_to_point(pybind11::module_& m);
// Copies and sums by themselves, and helpers of kernels. For tests and benchmarks.
void define_kernel_tests(pybind11::module_& testing);

}  // namespace ub_overlap
