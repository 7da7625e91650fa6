#include "core/matmul_algorithms.h"

#include <pybind11/stl.h>

#include "bindings/definitions.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/blas_search.h"
#endif

namespace py = pybind11;

namespace ub_overlap {
namespace {

py::dict as_dict(const std::map<std::string, std::string>& algorithms) {
    py::dict all;
    for (const auto& [key, bytes] : algorithms) all[py::str(key)] = py::bytes(bytes);
    return all;
}

#ifdef UB_OVERLAP_CUDA
py::list problems() {
    py::list all;
    for (const cuda::SearchProblem& problem : cuda::search_problems()) {
        py::list buffers;
        for (const cuda::SearchBuffer& b : problem.buffers) {
            buffers.append(py::make_tuple(b.name, name_of(b.type), b.bytes, b.alignment));
        }
        all.append(
            py::make_tuple(problem.key, problem.text, problem.uses, problem.has_chosen, problem.stores_at_peers, buffers));
    }
    return all;
}

py::list proposals(const std::string& key, int count) {
    py::list all;
    for (const std::string& bytes : cuda::propose_algorithms(key, count)) all.append(py::bytes(bytes));
    return all;
}
#endif

}  // namespace

void define_matmul_algorithms(py::module_& m) {
    m.def(
        "add_matmul_algorithms",
        [](int device, const std::map<std::string, std::string>& chosen) { MatmulAlgorithms::get().add(device, chosen); },
        py::arg("device"), py::arg("chosen"), "Use these algorithms from now on: key of a matmul -> bytes.");
    m.def(
        "matmul_algorithms", [](int device) { return as_dict(MatmulAlgorithms::get().of_device(device)); }, py::arg("device"));
    m.def("clear_matmul_algorithms", [] { MatmulAlgorithms::get().clear(); }, "Use the library's first proposals again.");
#ifdef UB_OVERLAP_CUDA
    m.def("matmul_problems", &problems,
          "(key, text, uses, has a chosen algorithm, stores at peers, [(buffer, dtype, bytes, alignment)]) of each matmul that "
          "has run on the current device.");
    m.def("propose_matmul_algorithms", &proposals, py::arg("key"), py::arg("count"));
    m.def(
        "run_matmul_algorithm",
        [](const std::string& key, const py::bytes& algorithm, const std::map<std::string, uint64_t>& buffers,
           uint64_t workspace, uint64_t stream) {
            cuda::run_algorithm(key, algorithm, buffers, workspace, reinterpret_cast<cudaStream_t>(stream));
        },
        py::arg("key"), py::arg("algorithm"), py::arg("buffers"), py::arg("workspace"), py::arg("stream"));
    m.def("blas_version", &cuda::blas_version, "The version of cuBLASLt that is loaded.");
#endif
}

}  // namespace ub_overlap
