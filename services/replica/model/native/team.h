// A few threads that meet at barriers. Between forward passes they sleep; inside one they spin, because a pass
// has hundreds of meetings a few microseconds apart.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace chorus {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { live(i); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      leaving_ = true;
      turn_++;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Every member runs `work(member)`; returns when all are done.
  void run(const std::function<void(int)>& work) {
    if (size_ > 1) {
      std::lock_guard<std::mutex> hold(lock_);
      work_ = &work;
      busy_ = size_ - 1;
      turn_++;
    }
    wake_.notify_all();
    work(0);
    while (busy_.load(std::memory_order_acquire)) pause();
  }

  // All members of a running `work` meet here.
  void meet() {
    if (size_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < 20000) pause();
      else std::this_thread::yield();  // fewer cores than members: let the others run
    }
  }

  // Half-open share of `count` things for a member, in multiples of `grain`.
  static void share(int count, int grain, int member, int size, int& from, int& to) {
    const int grains = (count + grain - 1) / grain;
    from = grains * member / size * grain;
    to = grains * (member + 1) / size * grain;
    if (to > count) to = count;
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }

  void live(int member) {
    unsigned seen = 0;
    for (;;) {
      const std::function<void(int)>* work;
      {
        std::unique_lock<std::mutex> hold(lock_);
        wake_.wait(hold, [&] { return turn_ != seen; });
        seen = turn_;
        if (leaving_) return;
        work = work_;
      }
      (*work)(member);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex lock_;
  std::condition_variable wake_;
  const std::function<void(int)>* work_ = nullptr;
  unsigned turn_ = 0;
  bool leaving_ = false;
  std::atomic<int> busy_{0}, arrived_{0};
  std::atomic<unsigned> phase_{0};
};

}  // namespace chorus
