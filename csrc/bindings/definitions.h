// Parts of the module ub_overlap._C that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace ub_overlap {

// Memory that ranks share.
void define_arenas(pybind11::module_& m);
// Sessions and their registry. After the classes of arenas.
void define_sessions(pybind11::module_& m);
// Lets C++ make sessions: `bind(group, device, slot_bytes, op, site)` returns a runtime.session.Session, which C++ keeps.
void set_bind(pybind11::object bind);
// Chosen algorithms of matmuls, and what a search for them needs.
void define_matmul_algorithms(pybind11::module_& m);
// What Python does for split collectives that c10d runs.
void define_plain_hooks(pybind11::module_& m);
// Channels and their messages. After the classes of arenas and sessions.
void define_point_to_point(pybind11::module_& m);
// Delays, pretended hosts, counts and times. For tests and benchmarks.
void define_testing(pybind11::module_& testing);
// Copies and sums by themselves, and helpers of kernels. For tests and benchmarks.
void define_kernel_tests(pybind11::module_& testing);

}  // namespace ub_overlap
