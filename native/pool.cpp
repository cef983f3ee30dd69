#include "pool.h"

#include <chrono>

#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace nano {
namespace {

int64_t process_id() {
#ifdef _WIN32
    return _getpid();
#else
    return getpid();
#endif
}

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    asm volatile("yield");
#endif
}

// Returns once `value` differs from `seen`: spins a while, then sleeps.
void await_change(const std::atomic<uint32_t> &value, uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
    do {
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != seen) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    while (value.load(std::memory_order_acquire) == seen) value.wait(seen, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) { start(); }

void Pool::start() {
    process_ = process_id();
    arrived_ = 0;
    threads_ = std::make_unique<std::vector<std::thread>>();
    const uint32_t seen = go_.load();
    try {
        for (int i = 1; i < size_; ++i) threads_->emplace_back([this, i, seen] { loop(i, seen); });
    } catch (...) {  // the system has no more of them: those that run must end before they are forgotten
        stop();
        throw;
    }
}

void Pool::stop() {
    closing_ = true;
    go_.fetch_add(1, std::memory_order_release);
    go_.notify_all();
    for (auto &thread : *threads_) thread.join();
}

Pool::~Pool() {
    if (process_ != process_id()) {
        threads_.release();  // handles of threads that exist in the parent only
        return;
    }
    stop();
}

void Pool::loop(int thread, uint32_t seen) {
    for (;;) {
        await_change(go_, seen);
        ++seen;
        if (closing_) return;
        (*part_)(thread);
        barrier();
    }
}

void Pool::run(const std::function<void(int)> &part) {
    if (size_ == 1) return part(0);
    if (process_ != process_id()) {
        threads_.release();
        start();
    }
    part_ = &part;
    go_.fetch_add(1, std::memory_order_release);
    go_.notify_all();
    part(0);
    barrier();
}

void Pool::barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
    } else {
        await_change(phase_, phase);
    }
}

}  // namespace nano
