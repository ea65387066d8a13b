// Large memory in huge pages, and buffers that grow.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace chorus {

// Zeroed memory that lives as long as this does; taken in pieces, aligned to cache lines.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (const auto& part : parts_) munmap(part.data, part.size);
  }

  uint8_t* take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (parts_.empty() || parts_.back().used + bytes > parts_.back().size) grow(bytes);
    Part& part = parts_.back();
    part.used += bytes;
    return part.data + part.used - bytes;
  }

  // Memory that is there already, page by page: nothing that uses it waits for the system to find some, which a
  // virtual machine may take milliseconds for, and too little of it shows now.
  uint8_t* take_present(size_t bytes) {
    uint8_t* data = take(bytes);
    for (size_t at = 0; at < bytes; at += PAGE) static_cast<volatile uint8_t*>(data)[at] = 0;
    return data;
  }

 private:
  struct Part {
    uint8_t* data;
    size_t size, used;
  };
  static constexpr size_t PART = size_t(16) << 20, HUGE_PAGE = size_t(2) << 20, PAGE = 4096;

  void grow(size_t bytes) {
    const size_t size = (std::max(bytes, PART) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(at, size, MADV_HUGEPAGE);
#endif
    parts_.push_back({static_cast<uint8_t*>(at), size, 0});
  }

  std::vector<Part> parts_;
};

// Grows, never shrinks; what stood in it is lost when it grows.
template <class T>
class Buffer {
 public:
  void need(size_t count) {
    if (count <= size_) return;
    data_.reset(new T[count]);
    size_ = count;
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](size_t i) { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
};

}  // namespace chorus
