// Calls runtime/ops/c10d_fallback.py: the plain collective and matmul, for groups that have no transport of ours.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace ub_overlap {

// A Python argument list being written. Needs the GIL from its construction on; PyObject* is void* here.
class ReferenceCall {
  public:
    explicit ReferenceCall(const std::string& op);
    ~ReferenceCall();
    ReferenceCall(const ReferenceCall&) = delete;
    ReferenceCall& operator=(const ReferenceCall&) = delete;

    ReferenceCall& tensor(const at::Tensor& value);  // undefined: None
    ReferenceCall& tensors(at::TensorList value);    // undefined ones: None
    ReferenceCall& integers(at::IntArrayRef value);
    ReferenceCall& integer(int64_t value);
    ReferenceCall& flag(bool value);
    ReferenceCall& text(const std::string& value);
    ReferenceCall& dtype(at::ScalarType value);
    ReferenceCall& dtypes(const std::vector<at::ScalarType>& value);

    // The op's results in order, lists flattened.
    std::vector<at::Tensor> run();

  private:
    void add(void* object);
    void* list_;
};

}  // namespace ub_overlap
