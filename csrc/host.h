// What the operator files share: the table that runs, and torch's pool behind a fork guard.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <pthread.h>

#include <string>

#include "cpu/kernels.h"

namespace lowbit {

// The table of a tier by name; "" is the best, or what QM_CPU_ISA lowers it to. Throws where it cannot run.
const cpu::KernelTable* table_of(const std::string& isa);

// torch's pool does not survive a fork: a child that asked it for work would wait for threads that are not
// there. So a child computes on the thread that called, with the same bits.
inline bool forked_child = false;
[[maybe_unused]] inline const int fork_watch = pthread_atfork(nullptr, nullptr, [] { forked_child = true; });

template <class F>
void parallel(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (forked_child)
    f(begin, end);
  else
    torch::stable::parallel_for(begin, end, grain, f);
}

}  // namespace lowbit
