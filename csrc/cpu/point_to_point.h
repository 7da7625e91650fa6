// Channels over shared memory. A thread per channel and direction, started by its first message.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <thread>

#include "cpu/channel_segment.h"

namespace ub_overlap {

class CpuPointToPoint final : public PointToPoint {
  public:
    CpuPointToPoint(std::shared_ptr<Arena> arena, std::shared_ptr<ChannelSegment> segment);
    ~CpuPointToPoint() override;
    void close() override;

  protected:
    std::shared_ptr<Transfer> begin(Message message, uint64_t first) override;

  private:
    class CpuTransfer;
    // State that transfers share with the channels, and may outlive them.
    struct Completion {
        std::mutex mutex;
        std::condition_variable changed;
        std::shared_ptr<ChannelSegment> segment;
        int rank = 0;
    };
    struct Worker {
        std::deque<std::shared_ptr<CpuTransfer>> jobs;
        std::condition_variable wake;
        std::thread thread;
    };
    void work(Worker& worker);
    void run(CpuTransfer& transfer);
    void wait_for_word(const CpuTransfer& transfer, const FlagWord& word, FlagKind kind, uint32_t number);
    int find_culprit(int peer, int64_t waited_ns);

    const std::shared_ptr<ChannelSegment> segment_;
    const std::shared_ptr<Completion> completion_;
    std::map<std::pair<bool, int>, Worker> workers_;  // by direction (sends) and peer
    std::atomic<bool> stop_{false};
};

}  // namespace ub_overlap
