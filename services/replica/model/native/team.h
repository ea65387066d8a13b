// A few threads that work through the phases of a pass together.
//
// A phase is a number of tasks that anyone may take; the next phase begins when all of them are done, whoever did them.
// So a thread that the system has put aside holds nobody up unless it is inside a task, and one that wakes late finds
// the work done and catches up. Between passes the threads sleep. With one member there are no threads and no waiting.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace chorus {

class Team {
  struct alignas(64) Phase {
    std::atomic<int> next{0};              // the next task to take
    alignas(64) std::atomic<int> done{0};  // tasks completed; a futex
  };

 public:
  class Member {  // one thread's way through a pass; every member calls the same `each` in the same order
   public:
    Member(Team& team, int index) : index(index), team_(team) {}
    const int index;

    template <class F>
    void each(int count, const F& task) {
      if (team_.size_ == 1) {
        for (int i = 0; i < count; i++) task(i);
        return;
      }
      Phase& phase = team_.phases_[at_++];
      for (int i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        task(i);
        if (phase.done.fetch_add(1) + 1 == count && team_.sleepers_.load()) wake(phase.done);
      }
      team_.wait(phase.done, count);
    }

   private:
    Team& team_;
    int at_ = 0;
  };

  Team(int size, int phases_max) : size_(size), phases_(phases_max) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { live(i); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      leaving_ = true;
    }
    begin_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Members that are awake run `work`; returns when it is done.
  void run(const std::function<void(Member&)>& work) {
    if (size_ > 1) {
      std::lock_guard<std::mutex> hold(lock_);
      for (auto& phase : phases_) phase.next = phase.done = 0;
      work_ = &work;
      turn_++;
    }
    begin_.notify_all();
    Member first(*this, 0);
    work(first);
    if (size_ == 1) return;
    std::unique_lock<std::mutex> hold(lock_);
    work_ = nullptr;  // who has not begun by now need not
    end_.wait(hold, [this] { return inside_ == 0; });
  }

  // Part `i` of `parts` of [0, count), in multiples of `grain`.
  static void share(int count, int grain, int i, int parts, int& from, int& to) {
    const int64_t grains = (count + grain - 1) / grain;
    from = int(grains * i / parts) * grain;
    to = std::min(count, int(grains * (i + 1) / parts) * grain);
  }

 private:
  static constexpr int SPINS = 800, YIELDS = 50;  // some 10 microseconds, then let others run

  void wait(std::atomic<int>& done, int count) {
    for (int spins = 0; spins < SPINS; spins++) {
      if (done.load(std::memory_order_acquire) >= count) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    for (int yields = 0; yields < YIELDS; yields++) {  // fewer cores than members: let the others run
      if (done.load(std::memory_order_acquire) >= count) return;
      std::this_thread::yield();
    }
    sleepers_.fetch_add(1);
    for (int seen; (seen = done.load()) < count;) {
#if defined(__linux__)
      syscall(SYS_futex, &done, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
      std::this_thread::yield();
#endif
    }
    sleepers_.fetch_sub(1);
  }

  static void wake(std::atomic<int>& done) {
#if defined(__linux__)
    syscall(SYS_futex, &done, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0);
#else
    (void)done;
#endif
  }

  void live(int index) {
    unsigned seen = 0;
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      begin_.wait(hold, [&] { return leaving_ || turn_ != seen; });
      if (leaving_) return;
      seen = turn_;
      if (!work_) continue;
      const auto& work = *work_;
      inside_++;
      hold.unlock();
      Member member(*this, index);
      work(member);
      hold.lock();
      if (--inside_ == 0) end_.notify_all();
    }
  }

  const int size_;
  std::vector<Phase> phases_;
  std::vector<std::thread> threads_;
  std::mutex lock_;
  std::condition_variable begin_, end_;
  const std::function<void(Member&)>* work_ = nullptr;
  unsigned turn_ = 0;
  int inside_ = 0;
  bool leaving_ = false;
  std::atomic<int> sleepers_{0};
};

}  // namespace chorus
