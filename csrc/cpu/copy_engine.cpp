#include "cpu/copy_engine.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "cpu/start_thread.h"

namespace ub_overlap {

CopyEngine& CopyEngine::get() {
    // Never destroyed: the thread may outlive static destruction. A child's copy of the parent's engine is left alone, since
    // its mutex may be held by a thread that the child does not have.
    static std::atomic<CopyEngine*> engine{nullptr};
    static std::atomic<int> owner{0};
    if (owner.load() != getpid()) {
        static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
        pthread_mutex_lock(&once);
        if (owner.load() != getpid()) {
            engine.store(new CopyEngine);
            owner.store(getpid());
        }
        pthread_mutex_unlock(&once);
    }
    return *engine.load();
}

std::shared_ptr<CopyEngine::Job> CopyEngine::submit(std::function<void()> run) {
    const std::shared_ptr<Job> job(new Job(std::move(run)));
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_ <= jobs_.size()) start_thread("copies for peers", [this] { loop(); }).detach();
    jobs_.push_back(job);
    wake_.notify_one();
    return job;
}

void CopyEngine::wait(const Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job.done; });
}

void CopyEngine::loop() {
    pthread_setname_np(pthread_self(), "ub_overlap-copy");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        ++idle_;
        wake_.wait(lock, [&] { return !jobs_.empty(); });
        --idle_;
        const std::shared_ptr<Job> job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job->run();
        lock.lock();
        job->done = true;
        done_.notify_all();
    }
}

}  // namespace ub_overlap
