// A c10d backend for tests: gloo's collectives of GPU tensors, over copies in host memory.
//
//     GPU tensor -- copy --> host: bytes, or float32 where halves are summed -- gloo --> host -- copy --> GPU tensor
//
// A collective is completed when it returns. A message is completed by wait(), as two ranks may send to each other first.
// gloo's own calls read GPU memory on the host in torch 2.11, which ends the process.

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace {

using c10d::Backend;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

class Completed final : public Work {
  public:
    explicit Completed(Tensors results) : Work(-1, c10d::OpType::UNKNOWN), results_(std::move(results)) { finish(); }
    bool wait(std::chrono::milliseconds) override { return true; }
    void synchronize() override {}
    Tensors result() override { return results_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        std::vector<c10::Device> devices;
        if (!results_.empty() && !results_[0].is_cpu()) devices.push_back(results_[0].device());
        auto future =
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
        future->markCompleted(c10::IValue(results_));
        return future;
    }

  private:
    const Tensors results_;
};

// A message. `received`: where the host's bytes go, or undefined for a send.
class Message final : public Work {
  public:
    Message(WorkPtr work, at::Tensor host, at::Tensor received)
        : Work(-1, c10d::OpType::UNKNOWN), work_(std::move(work)), host_(std::move(host)), received_(std::move(received)) {}
    bool wait(std::chrono::milliseconds timeout) override {
        if (!waited_) work_->wait(timeout);
        if (!waited_ && received_.defined()) received_.copy_(host_.view(received_.scalar_type()).view(received_.sizes()));
        waited_ = true;
        return true;
    }
    void synchronize() override { wait(kNoTimeout); }
    bool isCompleted() override { return waited_ || work_->isCompleted(); }

  private:
    const WorkPtr work_;
    const at::Tensor host_;
    const at::Tensor received_;
    bool waited_ = false;
};

at::Tensor copy_of(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type())).copy_(tensor);
}

// The bytes of a tensor in host memory, flat: gloo knows no float8.
at::Tensor bytes_of(const at::Tensor& tensor) {
    return copy_of(tensor).reshape({-1}).view(at::kByte);
}
at::Tensor bytes_like(const at::Tensor& tensor) {
    return at::empty({static_cast<int64_t>(tensor.nbytes())}, at::TensorOptions(at::kByte));
}
void store_bytes(const at::Tensor& tensor, const at::Tensor& bytes) {
    tensor.copy_(bytes.view(tensor.scalar_type()).view(tensor.sizes()));
}

// A tensor's summands in host memory.
at::Tensor summands_of(const at::Tensor& tensor) {
    const at::Tensor host = copy_of(tensor);
    return at::isReducedFloatingType(host.scalar_type()) ? host.to(at::kFloat) : host;
}
at::Tensor sum_like(const at::Tensor& tensor) {
    const bool is_half = at::isReducedFloatingType(tensor.scalar_type());
    return at::empty(tensor.sizes(), at::TensorOptions(is_half ? at::kFloat : tensor.scalar_type()));
}

// gloo has no average.
c10d::ReduceOp reduced_by(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

template <typename Body>
Tensors each(const Tensors& tensors, Body body) {
    Tensors made;
    for (const at::Tensor& tensor : tensors) made.push_back(body(tensor));
    return made;
}

class HostGloo final : public Backend {
  public:
    explicit HostGloo(c10::intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
    const std::string getBackendName() const override { return "gloo"; }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        Tensors host = each(tensors, bytes_of);
        gloo_->broadcast(host, options)->wait();
        return stored(tensors, host);
    }
    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        for (at::Tensor& tensor : tensors) {
            Tensors host = {summands_of(tensor)};
            c10d::AllreduceOptions sums = options;
            sums.reduceOp = reduced_by(options.reduceOp);
            gloo_->allreduce(host, sums)->wait();
            store_sum(tensor, host[0], options.reduceOp);
        }
        return c10::make_intrusive<Completed>(tensors);
    }
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        return allreduce(tensors, options);
    }
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        Tensors host = each(tensors, summands_of);
        c10d::ReduceOptions sums = options;
        sums.reduceOp = reduced_by(options.reduceOp);
        gloo_->reduce(host, sums)->wait();
        if (getRank() == options.rootRank) store_sum(tensors[0], host[0], options.reduceOp);
        return c10::make_intrusive<Completed>(tensors);
    }
    WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
        for (size_t i = 0; i < in.size(); ++i) {
            Tensors sent = {bytes_of(in[i])};
            std::vector<Tensors> host = {each(out[i], bytes_like)};
            gloo_->allgather(host, sent, options)->wait();
            stored(out[i], host[0]);
        }
        return c10::make_intrusive<Completed>(out.empty() ? Tensors() : out[0]);
    }
    WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
        at::Tensor sent = bytes_of(in), host = bytes_like(out);
        gloo_->_allgather_base(host, sent, options)->wait();
        return stored({out}, {host});
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
        for (size_t i = 0; i < in.size(); ++i) _allgather_base(out[i], in[i], options);
        return c10::make_intrusive<Completed>(out);
    }
    WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
        Tensors sent = each(in, bytes_of);
        std::vector<Tensors> host;
        for (const Tensors& tensors : out) host.push_back(each(tensors, bytes_like));
        gloo_->gather(host, sent, options)->wait();
        for (size_t i = 0; i < out.size(); ++i) stored(out[i], host[i]);
        return c10::make_intrusive<Completed>(out.empty() ? Tensors() : out[0]);
    }
    WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
        std::vector<Tensors> sent;
        for (const Tensors& tensors : in) sent.push_back(each(tensors, bytes_of));
        Tensors host = each(out, bytes_like);
        gloo_->scatter(host, sent, options)->wait();
        return stored(out, host);
    }
    WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
        for (size_t i = 0; i < out.size(); ++i) {
            at::Tensor whole = at::stack(in[i]);
            _reduce_scatter_base(out[i], whole, options);
        }
        return c10::make_intrusive<Completed>(out);
    }
    WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
        at::Tensor summands = summands_of(in).reshape({-1}), host = sum_like(out).reshape({-1});
        c10d::ReduceScatterOptions sums = options;
        sums.reduceOp = reduced_by(options.reduceOp);
        gloo_->_reduce_scatter_base(host, summands, sums)->wait();
        store_sum(out, host.view(out.sizes()), options.reduceOp);
        return c10::make_intrusive<Completed>(Tensors{out});
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
        for (size_t i = 0; i < in.size(); ++i) _reduce_scatter_base(out[i], in[i], options);
        return c10::make_intrusive<Completed>(out);
    }
    WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows, std::vector<int64_t>& in_rows,
                          const c10d::AllToAllOptions& options) override {
        const auto in_bytes_of_rows = [](const at::Tensor& tensor, std::vector<int64_t> rows) {
            const int64_t row = c10::multiply_integers(tensor.sizes().slice(1)) * tensor.element_size();
            for (int64_t& count : rows) count *= row;
            return rows;
        };
        std::vector<int64_t> received = in_bytes_of_rows(out, out_rows), sizes = in_bytes_of_rows(in, in_rows);
        at::Tensor sent = bytes_of(in), host = bytes_like(out);
        gloo_->alltoall_base(host, sent, received, sizes, options)->wait();
        return stored({out}, {host});
    }
    WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
        std::vector<int64_t> received, sizes;
        for (const at::Tensor& tensor : out) received.push_back(static_cast<int64_t>(tensor.nbytes()));
        for (const at::Tensor& tensor : in) sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
        at::Tensor sent = at::cat(each(in, bytes_of)), host = at::cat(each(out, bytes_like));
        const Tensors parts = host.split_with_sizes(received);  // before the call, which may clear the sizes
        gloo_->alltoall_base(host, sent, received, sizes, options)->wait();
        return stored(out, parts);
    }
    WorkPtr send(Tensors& tensors, int rank, int tag) override {
        Tensors host = each(tensors, bytes_of);
        return c10::make_intrusive<Message>(gloo_->send(host, rank, tag), host.at(0), at::Tensor());
    }
    WorkPtr recv(Tensors& tensors, int rank, int tag) override {
        Tensors host = each(tensors, bytes_like);
        return c10::make_intrusive<Message>(gloo_->recv(host, rank, tag), host.at(0), tensors.at(0));
    }
    WorkPtr barrier(const c10d::BarrierOptions& options) override {
        c10d::BarrierOptions of_host;
        of_host.timeout = options.timeout;
        return gloo_->barrier(of_host);
    }
    void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
    uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
    void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
    void abort() override { gloo_->abort(); }
    void shutdown() override { gloo_->shutdown(); }

  private:
    static WorkPtr stored(const Tensors& tensors, const Tensors& host) {
        for (size_t i = 0; i < tensors.size(); ++i) store_bytes(tensors[i], host.at(i));
        return c10::make_intrusive<Completed>(tensors);
    }
    void store_sum(const at::Tensor& tensor, const at::Tensor& sum, const c10d::ReduceOp& op) const {
        tensor.copy_(op == c10d::ReduceOp::AVG ? sum / getSize() : sum);
    }

    const c10::intrusive_ptr<Backend> gloo_;
};

c10::intrusive_ptr<Backend> wrap(const c10::intrusive_ptr<Backend>& gloo) {
    return c10::make_intrusive<HostGloo>(gloo);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("wrap", &wrap, pybind11::arg("gloo"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
