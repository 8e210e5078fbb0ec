// Work shared out to CPU threads, for both CPU kernels. Not for apply.cpp: see there why it may use no templates of
// the standard library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace fused_optim {

// Calls work(i) for each i < count, on at most `threads` threads, this one included.
template <class Work>
void for_each_index(size_t count, size_t threads, const Work& work) {
    std::atomic<size_t> next{0};
    auto loop = [&]() {
        for (size_t i = next++; i < count; i = next++) work(i);
    };
    std::vector<std::thread> others;
    for (size_t t = 1; t < std::min(threads, count); ++t) others.emplace_back(loop);
    loop();
    for (std::thread& other : others) other.join();
}

}  // namespace fused_optim
