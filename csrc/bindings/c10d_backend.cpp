#include "bindings/c10d_backend.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <mutex>

#include "bindings/messages.h"
#include "bindings/python.h"
#include "core/failure.h"
#include "core/registry.h"

namespace ub_overlap {
namespace {

using c10d::Backend;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<Backend>;

template <typename Body>
auto translated(Body body) {
    try {
        return body();
    } catch (...) {
        throw_as_python();
    }
}

// A message as c10d's Work. Failures are raised by wait().
class MessageWork final : public Work {
  public:
    MessageWork(std::shared_ptr<Transfer> transfer, int rank, c10d::OpType type, at::Tensor tensor)
        : Work(rank, type), transfer_(std::move(transfer)), tensor_(std::move(tensor)) {}

    bool isCompleted() override {
        const WithoutGil without_gil;
        return translated([&] { return transfer_->is_completed(); });
    }
    bool isSuccess() const override {
        const WithoutGil without_gil;
        return translated([&] {
            if (!transfer_->is_completed()) return false;
            if (!tensor_.is_cpu()) return true;  // the group's record has the failure
            try {
                transfer_->wait(nullptr);  // returns at once
            } catch (const std::exception&) {
                return false;
            }
            return true;
        });
    }
    // The deadline is that of a step: `timeout` is not used.
    bool wait(std::chrono::milliseconds) override {
        synchronize();
        return true;
    }
    void synchronize() override {
        const WithoutGil without_gil;
        translated([&] { transfer_->wait(current_stream(tensor_.device())); });
    }
    Tensors result() override { return {tensor_}; }

  private:
    const std::shared_ptr<Transfer> transfer_;
    const at::Tensor tensor_;
};

class ChannelBackend final : public Backend {
  public:
    // `replaced`: by device type.
    ChannelBackend(const c10d::ProcessGroup& group, std::map<at::DeviceType, BackendPtr> replaced)
        : Backend(group.getRank(), group.getSize()),
          name_(group.getGroupName()),
          owner_(&group),
          replaced_(std::move(replaced)) {
        setGroupUid(name_);
    }
    const std::string getBackendName() const override { return "ub_overlap"; }

    WorkPtr send(Tensors& tensors, int rank, int tag) override { return issue(tensors, true, rank, tag); }
    WorkPtr recv(Tensors& tensors, int rank, int tag) override { return issue(tensors, false, rank, tag); }
    WorkPtr recvAnysource(Tensors&, int) override { throw_refused("a channel has one source: name the rank to receive from"); }

    // The rest is that of the replaced backends. 2.15 has further collectives, which call these by default.
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return of(tensors).broadcast(tensors, options);
    }
    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return of(tensors).allreduce(tensors, options);
    }
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return of(tensors).allreduce_sparse(tensors, options);
    }
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        return of(tensors).allreduce_coalesced(tensors, options);
    }
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        return of(tensors).reduce(tensors, options);
    }
    WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
        return of(in).allgather(out, in, options);
    }
    WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
        return of(in)._allgather_base(out, in, options);
    }
    WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
        return of(in).allgather_coalesced(out, in, options);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
        return of(in).allgather_into_tensor_coalesced(out, in, options);
    }
    WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
        return of(in).gather(out, in, options);
    }
    WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
        return of(out).scatter(out, in, options);
    }
    WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
        return of(out).reduce_scatter(out, in, options);
    }
    WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
        return of(in)._reduce_scatter_base(out, in, options);
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
        return of(in).reduce_scatter_tensor_coalesced(out, in, options);
    }
    WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                          const c10d::AllToAllOptions& options) override {
        return of(in).alltoall_base(out, in, out_sizes, in_sizes, options);
    }
    WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
        return of(in).alltoall(out, in, options);
    }
    WorkPtr barrier(const c10d::BarrierOptions& options) override {
        // c10d chooses the device of a barrier; where it names none, that of NCCL waits for the current device.
        const bool named = options.device.has_value() && replaced_.count(options.device->type());
        return (named ? *replaced_.at(options.device->type()) : any()).barrier(options);
    }
    void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
        any().monitoredBarrier(options, wait_all);
    }
    // Of collectives. Messages are issued one by one, so this backend does not say that it supports coalescing.
    void startCoalescing() override { coalescing().startCoalescing(); }
    WorkPtr endCoalescing() override { return coalescing().endCoalescing(); }
    void setSequenceNumberForGroup() override {
        for (auto& [type, backend] : replaced_) backend->setSequenceNumberForGroup();
    }
    uint64_t getSequenceNumberForGroup() override { return any().getSequenceNumberForGroup(); }
    void setTimeout(std::chrono::milliseconds timeout) override {
        for (auto& [type, backend] : replaced_) backend->setTimeout(timeout);
    }
    void abort() override {
        for (auto& [type, backend] : replaced_) backend->abort();
    }
    void shutdown() override {
        for (auto& [type, backend] : replaced_) backend->shutdown();
    }

  private:
    Backend& any() const { return *replaced_.begin()->second; }
    Backend& coalescing() const {
        for (const auto& [type, backend] : replaced_) {
            if (backend->supportsCoalescing()) return *backend;
        }
        return any();  // it refuses
    }
    Backend& at_device(at::Device device) const {
        const auto found = replaced_.find(device.type());
        if (found == replaced_.end()) throw_refused("the group has no backend for the tensor's device");
        return *found->second;
    }
    Backend& of(const at::Tensor& tensor) const { return at_device(tensor.device()); }
    Backend& of(const Tensors& tensors) const { return tensors.empty() ? any() : of(tensors[0]); }

    [[noreturn]] void throw_refused(const char* what) const {
        translated([&] {
            throw NamedError("OptionError",
                             {{"what", what}, {"where", "group '" + name_ + "' with the c10d backend ub_overlap"}});
        });
        __builtin_unreachable();
    }

    WorkPtr issue(Tensors& tensors, bool sends, int peer, int tag) {
        if (tensors.size() != 1) throw_refused("a message is one tensor");
        const WithoutGil without_gil;
        const at::Tensor& tensor = tensors[0];
        const std::shared_ptr<PointToPoint> channels = translated([&] { return channels_of(tensor); });
        if (!channels) {
            Backend& other = of(tensor);
            return sends ? other.send(tensors, peer, tag) : other.recv(tensors, peer, tag);
        }
        const auto type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
        return translated([&] {
            auto transfer = channels->issue(message_of(tensor, sends, peer, tag));
            return WorkPtr(c10::make_intrusive<MessageWork>(std::move(transfer), peer, type, tensor));
        });
    }

    // The channels for tensors on a device, made at its first message. Null where the group has no transport. Held weakly: the
    // session frees their memory when the group is destroyed, also while a program holds the group.
    std::shared_ptr<PointToPoint> channels_of(const at::Tensor& tensor) {
        Registry::get().refuse_inherited(name_, owner_);
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = connected_.find(tensor.device().type());
        if (found != connected_.end()) {
            std::shared_ptr<PointToPoint> channels = found->second.channels.lock();
            if (found->second.has_transport && !channels) throw_refused("the group was destroyed");
            return channels;
        }
        const std::string device = c10::DeviceTypeName(tensor.device().type(), true);
        std::shared_ptr<PointToPoint> made = python_hooks().connect(name_, device, static_cast<int64_t>(tensor.nbytes()));
        connected_[tensor.device().type()] = {made != nullptr, made};
        return made;
    }

    const std::string name_;
    const void* const owner_;  // the process group
    const std::map<at::DeviceType, BackendPtr> replaced_;
    std::mutex mutex_;
    struct Connection {
        bool has_transport = false;
        std::weak_ptr<PointToPoint> channels;
    };
    std::map<at::DeviceType, Connection> connected_;
};

}  // namespace

void use_channels(const std::string& name) {
    const c10::intrusive_ptr<c10d::ProcessGroup> group = c10d::resolve_process_group(name);
    const std::vector<at::Device> devices = group->getDeviceTypes();
    std::map<at::DeviceType, BackendPtr> replaced;
    for (const at::Device& device : devices) {
        const BackendPtr backend = group->getBackend(device.type());
        if (dynamic_cast<ChannelBackend*>(backend.get())) return;
        replaced[device.type()] = backend;
    }
    const auto backend = c10::make_intrusive<ChannelBackend>(*group, std::move(replaced));
    for (const at::Device& device : devices) {
        group->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM, BackendPtr(backend));
    }
}

}  // namespace ub_overlap
