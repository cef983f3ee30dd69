// Memory on 64-byte boundaries that knows its size, so that every byte of a session can be counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

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

}  // namespace nano
