// Calls an op's c10d fallback in runtime/ops/: the plain collective and matmuls, for groups without a transport of ours.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <string>
#include <vector>

#include "bindings/ops/ops.h"

namespace ub_overlap {

// The op's arguments in schema order, as a Python list. Needs the GIL from its construction on; PyObject* is void* here.
class FallbackCall {
  public:
    explicit FallbackCall(const std::string& op);
    ~FallbackCall();
    FallbackCall(const FallbackCall&) = delete;
    FallbackCall& operator=(const FallbackCall&) = delete;

    FallbackCall& tensor(const at::Tensor& value);  // undefined: None
    FallbackCall& tensors(at::TensorList value);    // undefined ones: None
    FallbackCall& flags(const c10::List<bool>& value);
    FallbackCall& integer(int64_t value);
    FallbackCall& real(double value);
    FallbackCall& flag(bool value);
    FallbackCall& text(const std::string& value);
    FallbackCall& dtype(at::ScalarType value);
    FallbackCall& dtypes(const std::vector<at::ScalarType>& value);

    // Appends the site's arguments and calls the fallback. Returns the op's results in order, lists flattened.
    std::vector<at::Tensor> run(const Site& site);

  private:
    void add(void* object);
    void* list_;
};

}  // namespace ub_overlap
