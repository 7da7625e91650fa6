// Builds a Call from an op's arguments: checks them, writes the texts that ranks compare, and finds the group's session.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <sstream>
#include <string_view>

#include "bindings/ops/ops.h"
#include "bindings/python.h"
#include "core/registry.h"
#include "core/site_id.h"

namespace ub_overlap {

using at::Tensor;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

template <typename T>
std::string text_of(const T& value) {
    std::ostringstream out;
    out << value;
    return out.str();
}

// Returns whether ops can still find a group. destroy_process_group() ends that at once, even if the object is still held.
inline bool is_registered(const std::string& name, const c10::weak_intrusive_ptr<c10d::ProcessGroup>& group) {
    try {
        return c10d::resolve_process_group(name) == group.lock();
    } catch (const c10::Error&) {
        return false;
    }
}

// Starts with the call's site, group and strategy; the op adds its tensors.
class Builder {
  public:
    Builder(std::string op, at::Device device, const Site& site)
        : device_(device), site_(site), group_(c10d::resolve_process_group(site.group)) {
        Registry::get().refuse_inherited(site.group, group_.get());
        call.op_name = std::move(op);
        call.site = shared_site(site.id);
        call.own_site = site.id;
        call.strategy = site.strategy;
        call.rank = group_->getRank();
        call.ranks = group_->getSize();
        call.key.ranks = call.ranks;
        read_strategy(site.strategy);
    }

    Call call;

    [[noreturn]] void refuse(const std::string& what, const std::string& got, const std::string& expected) const {
        throw NamedError(
            "OptionError",
            {{"what", what}, {"where", call.op_name + " at site '" + call.site + "'"}, {"got", got}, {"expected", expected}});
    }
    void check(bool good, const std::string& what, const std::string& got, const std::string& expected) const {
        if (!good) refuse(what, got, expected);
    }

    enum class Float8 { no, may, must };
    DType type_of(at::ScalarType type, Float8 float8 = Float8::no) const {
        if (float8 != Float8::no) {
            if (type == at::kFloat8_e4m3fn) return DType::e4m3;
            if (type == at::kFloat8_e5m2) return DType::e5m2;
        }
        if (float8 != Float8::must) {
            if (type == at::kFloat) return DType::f32;
            if (type == at::kBFloat16) return DType::bf16;
            if (type == at::kHalf) return DType::f16;
        }
        constexpr const char *wide = "float32, bfloat16 or float16", *narrow = "float8_e4m3fn or float8_e5m2";
        refuse("this dtype is not supported here", c10::toString(type),
               float8 == Float8::no     ? wide
               : float8 == Float8::must ? narrow
                                        : std::string(wide) + ", " + narrow);
    }

    // A view of a 2D tensor, which must outlive the call.
    Matrix matrix(const Tensor& t, const char* name, Float8 float8 = Float8::no) const {
        check(t.device() == device_, std::string(name) + " is on another device", text_of(t.device()), text_of(device_));
        check(t.dim() == 2, std::string(name) + " is not a matrix", text_of(t.sizes()), "two dims");
        const DType type = type_of(t.scalar_type(), float8);
        return {static_cast<char*>(t.data_ptr()), t.size(0), t.size(1), t.stride(0), t.stride(1), type};
    }

    // Scales of float8 numbers: one, or with `each` one per line. A copy lives as long as the builder.
    Scale scale(const Tensor& t, int64_t lines, bool each, const char* name) {
        const std::string what = std::string("the scales of ") + name;
        check(t.device() == device_, what + " are on another device", text_of(t.device()), text_of(device_));
        check(t.scalar_type() == at::kFloat, what + " have another dtype", c10::toString(t.scalar_type()), "float32");
        check(t.numel() == (each ? lines : 1), what + " do not fit", text_of(t.sizes()),
              each ? std::to_string(lines) + " of them, since the other operand has one per line"
                   : "one, since the other operand has one");
        kept_.push_back(t.contiguous());
        return {kept_.back().const_data_ptr<float>(), each};
    }

    // Checks that tensor cores can multiply a @ b in float8: `a` row-major, `b` column-major, sizes that divide by 16.
    void check_float8(const Matrix& a, const Matrix& b) const {
        const std::string sizes = "[" + std::to_string(a.rows) + ", " + std::to_string(a.cols) + "] @ [" +
                                  std::to_string(b.rows) + ", " + std::to_string(b.cols) + "]";
        check(a.cols % 16 == 0 && b.cols % 16 == 0, "the sizes of a float8 product do not divide by 16", sizes,
              "[M, K] @ [K, N], K and N multiples of 16");
        check(a.type == DType::e4m3 || b.type == DType::e4m3, "no device multiplies float8_e5m2 by float8_e5m2", sizes,
              "float8_e4m3fn on one side or both");
        const auto strides = [](const Matrix& m) {
            return "strides " + std::to_string(m.row_stride) + ", " + std::to_string(m.col_stride);
        };
        const bool none = a.rows == 0 || a.cols == 0 || b.cols == 0;
        check(none || (a.col_stride == 1 && (a.rows == 1 || (a.row_stride >= a.cols && a.row_stride % 16 == 0))),
              "the left operand of a float8 product is not row-major", strides(a),
              "rows of one piece, 16 bytes apart or a multiple");
        check(none || (b.row_stride == 1 && b.col_stride >= b.rows && b.col_stride % 16 == 0),
              "the right operand of a float8 product is not column-major", strides(b),
              "the transposed view of a contiguous [N, K]");
    }

    // Equal shards of `rows` rows each.
    void deal_equally(int64_t outer, int64_t rows, int64_t inner) {
        call.outer = outer, call.inner = inner;
        call.begin.resize(call.ranks + 1);
        for (int r = 0; r <= call.ranks; ++r) call.begin[r] = r * rows;
    }
    // Any number of rows: shard s ends where floor says.
    void deal_floor(int64_t rows, int64_t inner) {
        call.outer = 1, call.inner = inner;
        call.begin.resize(call.ranks + 1);
        for (int r = 0; r <= call.ranks; ++r) call.begin[r] = rows * r / call.ranks;
    }

    void reduce_by(const std::string& op) {
        check(op == "sum" || op == "avg", "this reduce_op is not supported", "'" + op + "'", "'sum' or 'avg'");
        call.average = op == "avg";
    }

    void describe(const char* name, const Tensor& t) { describe(name, t.sizes(), t.dtype()); }
    void describe(const char* name, at::IntArrayRef sizes, caffe2::TypeMeta type) {
        shape_ += name;
        append(sizes);
        shape_ += ' ';
        shape_ += type.name();
        shape_ += "; ";
    }
    template <typename T>
    void note(const char* name, const T& value) {
        shape_ += name;
        shape_ += '=';
        append(value);
        shape_ += "; ";
    }

    void set_split_slot(int64_t split_slot) {
        check(0 <= split_slot && split_slot < split_slots, "there is no such split slot", std::to_string(split_slot),
              "0 to " + std::to_string(split_slots - 1));
        call.split_slot = static_cast<int>(split_slot);
    }

    // Adds what only this rank knows: it is shown and not compared.
    void note_own(const char* name, at::IntArrayRef values) {
        std::string shared = std::move(shape_);
        shape_ = std::move(own_);
        shape_ += name;
        append(values);
        shape_ += "; ";
        own_ = std::exchange(shape_, std::move(shared));
    }

    // Finds or creates the session of the group.
    std::shared_ptr<Session> session() {
        if (session_) return session_;
        const std::string device = c10::DeviceTypeName(device_.type(), true);
        session_ = Registry::get().find(site_.group, device, group_.get());
        if (session_) return session_;
        if (!python_hooks().bind) {
            throw NamedError("UbOverlapError",
                             {{"what", "the runtime is not loaded"}, {"fix", "import ub_overlap.runtime.ops"}});
        }
        session_ = python_hooks().bind(site_.group, device, call);
        const c10::weak_intrusive_ptr<c10d::ProcessGroup> weak(group_);
        Registry::get().put(session_, group_.get(),
                            [weak, name = site_.group] { return !weak.expired() && is_registered(name, weak); });
        return session_;
    }

    at::Device device() const { return device_; }
    const GroupPtr& group() const { return group_; }

    // Sets the text that ranks compare, and its hash: equal on all ranks of a correct program.
    void seal() {
        if (call.key.engine_copies && call.key.kind != "all_gather_matmul") {
            refuse("copies=engine copies what has landed and is kept, and here nothing is gathered", "'" + call.strategy + "'",
                   "copies=engine at all_gather_matmul or all_gather_scaled_matmul");
        }
        call.shape_text = shape_ + own_;
        call.key.shard_dim_is_last = call.shard_dim_is_last;
        if (call.shard_dim_is_last) {  // such shards cannot be cut
            if (call.key.striped || call.key.chunks > call.ranks) call.key.chunks = call.ranks;
            call.key.striped = false;
        }
        uint32_t hash = 2166136261u;  // FNV-1a
        for (const std::string* part : {&call.op_name, &call.site, &call.strategy, &shape_}) {
            for (const char c : *part) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
            hash = (hash ^ 0xffu) * 16777619u;
        }
        call.tag = hash ? hash : 1;
    }

  private:
    // Sets chunks, striped, direct and engine_copies. Runs at every call, so texts are built only for errors.
    void read_strategy(const std::string& strategy) {
        if (strategy == "none") return;
        if (call.op_name == "fused_collective") {
            check(strategy == "one_shot" || strategy == "two_shot", "this strategy is unknown", "'" + strategy + "'",
                  "'none', 'one_shot' or 'two_shot' (all_reduces)");
            call.is_fused = true, call.two_shot = strategy == "two_shot";
            return;
        }
        const size_t colon = strategy.find(':');
        const std::string_view text(strategy), name = text.substr(0, colon);
        constexpr std::string_view engine = ":copies=engine";
        const auto need = [&](bool good, const char* what) {
            if (good) return;
            refuse(
                what, "'" + strategy + "'",
                "'none', 'pipelined', 'pipelined:chunks=N', 'pipelined:stripes=N' or 'direct' (reductions), "
                "'pipelined:copies=engine' or 'pipelined:chunks=N:copies=engine' (gathers), 'bulk' or 'bulk:chunks=N', N of 1 "
                "or more");
        };
        call.key.direct = strategy == "direct";
        need(name == "pipelined" || name == "bulk" || call.key.direct, "this strategy is unknown");
        if (colon == std::string::npos) return;
        std::string_view rest = text.substr(colon);
        if (rest.size() >= engine.size() && rest.substr(rest.size() - engine.size()) == engine) {
            call.key.engine_copies = true;
            need(name == "pipelined", "this strategy is not understood");
            rest.remove_suffix(engine.size());
            if (rest.empty()) return;
        }
        rest.remove_prefix(1);
        const std::string_view label = rest.substr(0, rest.find('=') + 1);
        const std::string_view digits = rest.substr(label.size());
        call.key.striped = label == "stripes=";
        need(label == "chunks=" || (call.key.striped && name == "pipelined"), "this strategy is not understood");
        need(!digits.empty() && digits.size() < 7 && digits.find_first_not_of("0123456789") == std::string_view::npos,
             "this strategy is not understood");
        for (const char digit : digits) call.key.chunks = call.key.chunks * 10 + (digit - '0');
        need(call.key.chunks > 0, "this strategy is not understood");
        const int64_t most = static_cast<int64_t>(max_pieces) * (call.key.striped ? 1 : call.ranks);
        if (call.key.chunks > most)
            refuse("too many chunks", std::to_string(call.key.chunks), "at most " + std::to_string(most));
    }

    void append(int64_t value) { shape_ += std::to_string(value); }
    void append(bool value) { shape_ += value ? '1' : '0'; }
    void append(const std::string& value) { shape_ += value; }
    void append(const char* value) { shape_ += value; }
    void append(const c10::List<bool>& values) {
        for (size_t i = 0; i < values.size(); ++i) append(static_cast<bool>(values.get(i)));
    }
    void append(at::IntArrayRef values) {
        shape_ += '[';
        for (size_t i = 0; i < values.size(); ++i) {
            if (i) shape_ += ", ";
            append(values[i]);
        }
        shape_ += ']';
    }

    const at::Device device_;
    const Site& site_;  // of the caller, who outlives the builder
    GroupPtr group_;
    std::string shape_, own_;
    std::vector<Tensor> kept_;
    std::shared_ptr<Session> session_;
};

}  // namespace ub_overlap
