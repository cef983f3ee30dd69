// Memory on 64-byte boundaries that knows its size, so that every byte of a session can be counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace nano {

class Memory {
public:
    Memory() = default;

    // Not filled. Large blocks come from the kernel untouched: what is never written is never resident.
    explicit Memory(size_t bytes) : data_(static_cast<uint8_t *>(::operator new(bytes, std::align_val_t(64)))), bytes_(bytes) {}

    uint8_t *data() const { return data_.get(); }
    template <class T>
    T *as() const {
        return reinterpret_cast<T *>(data_.get());
    }
    size_t bytes() const { return bytes_; }

    // Not smaller than `bytes` afterwards; what it held is lost if it grows.
    void need(size_t bytes) {
        if (bytes <= bytes_) return;
        *this = Memory();
        *this = Memory(bytes);
    }

private:
    struct Free {
        void operator()(uint8_t *p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<uint8_t, Free> data_;
    size_t bytes_ = 0;  // a moved-from Memory is assigned anew before use
};

// Memory that is taken piece by piece and given back as a whole, on huge pages where the system has them: decoding streams through
// all weights for each token, and finding the addresses of small pages takes as long as reading them.
class Arena {
public:
    // 64-byte aligned, not filled.
    uint8_t *take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > left_) {
            const size_t size = bytes < kChunk ? kChunk : (bytes + kPage - 1) / kPage * kPage;
            chunks_.emplace_back(static_cast<uint8_t *>(::operator new(size, std::align_val_t(kPage))));
            next_ = chunks_.back().get();
            left_ = size;
#ifdef MADV_HUGEPAGE
            madvise(next_, left_, MADV_HUGEPAGE);  // a wish: without it, pages are small
#endif
        }
        uint8_t *taken = next_;
        next_ += bytes;
        left_ -= bytes;
        bytes_ += bytes;
        return taken;
    }

    size_t bytes() const { return bytes_; }  // that were taken

private:
    static constexpr size_t kPage = size_t(2) << 20, kChunk = size_t(32) << 20;
    struct Free {
        void operator()(uint8_t *p) const { ::operator delete(p, std::align_val_t(kPage)); }
    };
    std::vector<std::unique_ptr<uint8_t, Free>> chunks_;
    uint8_t *next_ = nullptr;
    size_t left_ = 0, bytes_ = 0;
};

}  // namespace nano
