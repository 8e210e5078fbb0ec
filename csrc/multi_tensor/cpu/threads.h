// Work shared out to CPU threads, for all CPU kernels. Not for apply.cpp: see there why it may use no templates of the
// standard library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <vector>

namespace fused_optim {

// Calls work(thread) for each thread < count: 0 on the calling one, the others on threads that stay for the next call,
// the same number on the same one. Calls that meet wait for each other. Returns when all are done; `work` must not
// throw.
void run_on_threads(size_t count, const std::function<void(size_t)>& work);

// The part of the work that a thread begins with.
struct alignas(64) Share {
    std::atomic<size_t> next;
    size_t end;
};

// Calls work(i) for each i < count, on at most `threads` threads, this one included. Each has a share of its own, of
// consecutive indices, and helps the others when it is done. So a thread meets the same memory in every step.
template <class Work>
void for_each_index(size_t count, size_t threads, const Work& work) {
    threads = std::max<size_t>(std::min(threads, count), 1);
    std::vector<Share> shares(threads);
    for (size_t t = 0; t < threads; ++t) {
        shares[t].next = count * t / threads;
        shares[t].end = count * (t + 1) / threads;
    }
    run_on_threads(threads, [&](size_t thread) {
        for (size_t k = 0; k < threads; ++k) {
            Share& share = shares[(thread + k) % threads];
            for (size_t i = share.next++; i < share.end; i = share.next++) work(i);
        }
    });
}

}  // namespace fused_optim
