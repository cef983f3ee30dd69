// A pool of threads that run one function together and meet at barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace nano {

// Threads spin for about 50 µs for the next phase (phases of a step follow each other within microseconds), then sleep in the
// kernel: an idle pool uses no processor time. The caller of `run` is thread 0.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int size() const { return size_; }

    // Calls `part(thread)` on every thread and returns when all have returned. `part` must not throw; memory is allocated before.
    void run(const std::function<void(int)> &part);

    // Inside `part`: no thread passes before all have come. What was written before is visible after.
    void barrier();

private:
    void start();
    void stop();
    void loop(int thread, uint32_t seen);

    int size_;
    int64_t process_ = 0;  // threads do not survive a fork: the child starts its own
    const std::function<void(int)> *part_ = nullptr;
    bool closing_ = false;
    std::unique_ptr<std::vector<std::thread>> threads_;
    alignas(64) std::atomic<uint32_t> go_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

// The contiguous share of `count` items that thread `thread` of `threads` has: [begin, end).
struct Share {
    int64_t begin, end;
};
inline Share share(int64_t count, int thread, int threads) { return {count * thread / threads, count * (thread + 1) / threads}; }

}  // namespace nano
