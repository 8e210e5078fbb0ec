// The CPU engine's threads.
#include "cpu/threads.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace fused_optim {
namespace {

class Pool {
public:
    void run(size_t count, const std::function<void(size_t)>& work) {
        std::lock_guard<std::mutex> turn(turn_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (started_ + 1 < count) start();
            work_ = &work;
            wanted_ = count - 1;
            unfinished_ = count - 1;
            ++round_;
        }
        begin_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        end_.wait(lock, [&] { return unfinished_ == 0; });
    }

private:
    void start() {
        std::thread(&Pool::serve, this, started_, round_).detach();
        ++started_;
    }

    // Rounds that a thread has no part in may pass unseen.
    void serve(size_t index, size_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            begin_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index >= wanted_) continue;
            lock.unlock();
            (*work_)(index + 1);
            lock.lock();
            if (--unfinished_ == 0) end_.notify_one();
        }
    }

    std::mutex turn_;   // of the callers
    std::mutex mutex_;  // of what follows
    std::condition_variable begin_, end_;
    const std::function<void(size_t)>* work_ = nullptr;
    size_t started_ = 0, wanted_ = 0, unfinished_ = 0, round_ = 0;
};

// Never destroyed: its threads wait until the process ends. A forked process has none of them, and gets a pool of its
// own.
Pool* pool = nullptr;

void renew() { pool = new Pool; }

Pool& the_pool() {
    static const bool ready = [] {
        renew();
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, renew);
#endif
        return true;
    }();
    static_cast<void>(ready);
    return *pool;
}

}  // namespace

void run_on_threads(size_t count, const std::function<void(size_t)>& work) {
    if (count <= 1) return work(0);
    the_pool().run(count, work);
}

}  // namespace fused_optim
