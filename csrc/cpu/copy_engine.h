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
#include <utility>

namespace ub_overlap {

class CopyEngine {
  public:
    static CopyEngine& get();

    // A function that a thread will run, or runs, or has run: only `submit` makes one, once there is such a thread.
    class Job {
      private:
        friend class CopyEngine;
        explicit Job(std::function<void()> run) : run(std::move(run)) {}
        std::function<void()> run;
        bool done = false;
    };
    // `run` must not throw. NamedError where it needs a thread that cannot be started: then nothing is queued.
    std::shared_ptr<Job> submit(std::function<void()> run);
    // Returns when the job has run; what it refers to must live until then.
    void wait(const Job& job);

  private:
    void loop();
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<std::shared_ptr<Job>> jobs_;
    size_t idle_ = 0;  // threads that wait for a job
};

}  // namespace ub_overlap
