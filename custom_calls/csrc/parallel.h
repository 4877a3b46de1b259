// Spreads one handler's work over XLA's intra-op thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "ffi.h"

namespace jaxmoe {

// Calls work(i) for every i in [0, num_units), on the calling thread and on threads of the pool
// that happen to be free. `work` must not block.
//
// Handlers of many virtual devices may hold every thread of the pool at once, so the caller never
// waits for a helper that has not started: it takes units itself until none is left, then waits
// only for those that running helpers have taken. A helper that starts after that finds no unit,
// and touches nothing but the counters, which it co-owns.
template <class Work>
void ParallelFor(ThreadPool& pool, int64_t num_units, Work work) {
  struct State {
    State(Work work, int64_t num_units) : work(std::move(work)), num_units(num_units) {}

    void Run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) {
        work(i);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_units) done.notify_all();
      }
    }

    Work work;
    const int64_t num_units;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };

  const int64_t num_helpers = num_units > 1 ? std::min(num_units, pool.num_threads()) - 1 : 0;
  if (num_helpers <= 0) {
    for (int64_t i = 0; i < num_units; ++i) work(i);
    return;
  }
  auto state = std::make_shared<State>(std::move(work), num_units);
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([state] { state->Run(); });
  state->Run();
  for (int64_t done; (done = state->done.load(std::memory_order_acquire)) < num_units;) {
    state->done.wait(done, std::memory_order_acquire);
  }
}

}  // namespace jaxmoe
