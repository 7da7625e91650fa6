#include "core/schedule.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "core/failure.h"

namespace ub_overlap {
namespace {

// Reads one encoded step front to back.
class Reader {
  public:
    Reader(const std::vector<int64_t>& ints, size_t place) : ints_(ints), place_(place) {}

    int64_t next() {
        if (at_ >= ints_.size()) fail("it ends after " + std::to_string(at_) + " numbers");
        return ints_[at_++];
    }
    int64_t next(int64_t low, int64_t high, const char* what) {
        const int64_t value = next();
        if (value < low || value > high) {
            fail(std::string(what) + " is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " +
                 std::to_string(high));
        }
        return value;
    }
    Region region(int ranks) {
        Region r;
        r.buf = static_cast<Buf>(next(0, 6, "buffer"));
        r.rank = static_cast<int>(next(0, ranks - 1, "rank"));
        r.shard = static_cast<int>(next(0, ranks - 1, "shard"));
        r.lo.num = next();
        r.lo.den = next(1, INT32_MAX, "denominator");
        r.hi.num = next();
        r.hi.den = next(1, INT32_MAX, "denominator");
        if (r.lo.num < 0 || r.hi.num > r.hi.den || r.lo.num * r.hi.den > r.hi.num * r.lo.den)
            fail("a piece is not within 0..1");
        r.index = static_cast<int>(next(0, INT32_MAX, "index"));
        return r;
    }
    FlagId flag(int ranks) {
        FlagId f;
        f.kind = static_cast<FlagKind>(next(0, flag_kinds - 1, "flag kind"));
        f.rank = static_cast<int>(next(0, ranks - 1, "flag rank"));
        f.source = static_cast<int>(next(0, ranks - 1, "flag source"));
        f.index = static_cast<int>(next(0, max_pieces - 1, "piece (too many chunks?)"));
        return f;
    }
    std::vector<Region> regions(int ranks) {
        std::vector<Region> list(static_cast<size_t>(next(0, INT32_MAX, "count")));
        for (Region& r : list) r = region(ranks);
        return list;
    }
    FlagWait wait(int ranks) {
        FlagWait w{flag(ranks), 0};
        w.back = static_cast<int>(next(0, INT32_MAX, "back"));
        return w;
    }
    ComputeKind compute_kind() {
        const int64_t kind = next();
        if (kind != static_cast<int64_t>(ComputeKind::matmul)) {
            const std::string got = "compute kind " + std::to_string(kind);
            throw NamedError("UbOverlapError",
                             {{"what", "step " + std::to_string(place_) + " of a schedule has an unknown kind, " + got},
                              {"got", got},
                              {"expected", "0 (matmul)"},
                              {"fix", "report this as a bug"}});
        }
        return ComputeKind::matmul;
    }
    void end() {
        if (at_ != ints_.size()) fail("it has " + std::to_string(ints_.size() - at_) + " numbers too many");
    }
    [[noreturn]] void fail(const std::string& why) {
        throw NamedError("UbOverlapError", {{"what", "step " + std::to_string(place_) + " of a schedule cannot be run: " + why},
                                            {"fix", "use fewer chunks; if that is not it, report this as a bug"}});
    }

  private:
    const std::vector<int64_t>& ints_;
    size_t place_, at_ = 0;
};

struct Cache {
    std::mutex mutex;
    std::map<std::pair<Key, int>, std::shared_ptr<const Program>> programs;
    ProgramCache::Provider provider;
    int64_t calls = 0;
    std::atomic<bool> mirrored = false;
};

Cache& cache() {
    static Cache* one = new Cache;  // never destroyed: the provider may hold Python objects
    return *one;
}

}  // namespace

Program decode(const EncodedSchedule& encoded, int rank, int ranks, bool mirrored) {
    static std::atomic<uint64_t> count{0};
    Program program;
    program.id = ++count;
    for (size_t place = 0; place < encoded.size(); ++place) {
        Reader in(encoded[place], place);
        Step step;
        step.kind = static_cast<StepKind>(in.next(0, 8, "opcode"));
        step.queue = static_cast<int>(in.next(0, 1, "queue"));
        step.record = static_cast<int>(in.next(-1, INT32_MAX, "event"));
        step.after.resize(static_cast<size_t>(in.next(0, INT32_MAX, "count")));
        for (int& event : step.after) event = static_cast<int>(in.next(0, INT32_MAX, "event"));
        switch (step.kind) {
            case StepKind::copy:
                step.reads = {in.region(ranks)};
                step.writes = {in.region(ranks)};
                break;
            case StepKind::signal:
                step.flag = in.flag(ranks);
                if (step.flag.source != rank && !mirrored) in.fail("it writes the flag of another rank");
                break;
            case StepKind::wait:
                step.waits = {in.wait(ranks)};
                break;
            case StepKind::compute: {
                step.compute = in.compute_kind();
                step.index = static_cast<int>(in.next(0, INT32_MAX, "index"));
                step.accumulate = in.next(0, 1, "accumulate") != 0;
                step.reads = in.regions(ranks);
                step.writes = in.regions(ranks);
                step.waits.resize(static_cast<size_t>(in.next(0, INT32_MAX, "count")));
                for (FlagWait& gate : step.waits) gate = in.wait(ranks);
                break;
            }
            case StepKind::reduce:
                step.reads = in.regions(ranks);
                step.writes = {in.region(ranks)};
                break;
            case StepKind::finish:
                step.index = static_cast<int>(in.next(0, INT32_MAX, "index"));
                break;
            case StepKind::return_:
                (program.finish_begin ? program.release_begin : program.finish_begin) = static_cast<int>(place) + 1;
                break;
            case StepKind::release:
                step.reads = in.regions(ranks);
                break;
            case StepKind::round:
                if (program.round_end != 0) in.fail("it begins a third round");
                (program.round_begin ? program.round_end : program.round_begin) = static_cast<int>(place) + 1;
                break;
        }
        in.end();
        if (step.kind != StepKind::copy && step.kind != StepKind::signal && step.kind != StepKind::wait &&
            step.queue != compute_queue) {
            in.fail("only copies, signals and waits run on the copy queue");
        }
        for (const FlagWait& wait : step.waits) {
            if (wait.flag.rank != rank) in.fail("it waits for a flag in the memory of another rank");
        }
        program.events = std::max(program.events, step.record + 1);
        program.queues[step.queue].push_back(static_cast<int>(place));
        program.steps.push_back(std::move(step));
    }
    for (const Step& step : program.steps) {
        for (int event : step.after) program.events = std::max(program.events, event + 1);
    }
    if (program.round_begin == 0) program.round_begin = program.round_end = static_cast<int>(program.steps.size());
    if (program.release_begin == 0) program.release_begin = static_cast<int>(program.steps.size());
    return program;
}

std::shared_ptr<const Program> ProgramCache::get(const Key& key, int rank) {
    Cache& c = cache();
    Provider provider;
    bool mirrored = false;
    {
        std::lock_guard<std::mutex> lock(c.mutex);
        auto found = c.programs.find({key, rank});
        if (found != c.programs.end()) return found->second;
        provider = c.provider;
        mirrored = c.mirrored;
        ++c.calls;
    }
    if (!provider) {
        throw NamedError("UbOverlapError",
                         {{"what", "no schedule provider is installed"}, {"fix", "import ub_overlap.runtime.ops"}});
    }
    // Outside the lock: the provider takes the GIL, whose holder may be waiting for the lock.
    auto program = std::make_shared<const Program>(decode(provider(key, rank), rank, key.ranks, mirrored));
    std::lock_guard<std::mutex> lock(c.mutex);
    return c.programs.emplace(std::make_pair(key, rank), program).first->second;
}

void ProgramCache::set_provider(Provider provider) {
    std::lock_guard<std::mutex> lock(cache().mutex);
    cache().provider = std::move(provider);
}

int64_t ProgramCache::provider_calls() {
    std::lock_guard<std::mutex> lock(cache().mutex);
    return cache().calls;
}

void ProgramCache::set_mirrored(bool on) {
    std::lock_guard<std::mutex> lock(cache().mutex);
    cache().mirrored = on;
    cache().programs.clear();
}

bool ProgramCache::is_mirrored() {
    return cache().mirrored.load(std::memory_order_relaxed);
}

void ProgramCache::clear() {
    std::lock_guard<std::mutex> lock(cache().mutex);
    cache().programs.clear();
}

}  // namespace ub_overlap
