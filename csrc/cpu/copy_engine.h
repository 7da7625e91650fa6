// The process's copy engine: a thread that runs COPY queues, for all groups.
//
// It stands for the device's copy-engine stream. Started at the first job; a forked child, which has no such thread, starts its
// own. Where several threads call ops at once there are as many engine threads: the COPY queue of an all_reduce waits for its
// peers, so two queues behind each other, in one order here and in the other there, would wait for ever.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace ub_overlap {

class CopyEngine {
  public:
    static CopyEngine& get();

    // `job` must not throw. `wait` returns when it has run; what the job refers to must live until then.
    struct Job {
        std::function<void()> run;
        bool done = false;
    };
    void submit(Job& job);
    void wait(Job& job);

  private:
    void loop();
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Job*> jobs_;
    size_t idle_ = 0;  // threads that wait for a job
};

}  // namespace ub_overlap
