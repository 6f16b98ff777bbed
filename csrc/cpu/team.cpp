#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowbit::cpu::team {
namespace {

constexpr int kPieces = 4;                            // a thread, measured 2026-11-30: docs/kernels.md
constexpr auto kSpin = std::chrono::milliseconds(2);  // longer than what Python does between two tokens

void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// One word tells which region runs, who may help and what is left of it, so that one compare-and-swap claims
// a piece of exactly the region that was looked at:
//   region (24 bits) | threads (8) | pieces (16) | next piece (16)
struct Ticket {
  uint64_t word;
  int threads() const { return static_cast<int>(word >> 32 & 255) + 1; }
  uint32_t pieces() const { return word >> 16 & 0xffff; }
  uint32_t next() const { return word & 0xffff; }
  bool left() const { return next() < pieces(); }
};

struct Team {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> done{0};
  // Written while no piece is claimed; read by whoever holds one.
  alignas(64) int64_t begin = 0, end = 0, piece = 0;
  void (*body)(int64_t, int64_t, void*) = nullptr;
  void* context = nullptr;

  std::atomic<bool> taken{false};  // by the caller whose region runs
  std::mutex bed;
  std::condition_variable bell;
  std::atomic<int> asleep{0};
  int workers = 0;
};

Team& team() {  // never destroyed: workers outlive the statics of this file
  static auto* const one = new Team;
  return *one;
}
thread_local int number = 0;

struct Release {
  std::atomic<bool>& taken;
  ~Release() { taken.store(false, std::memory_order_release); }
};

bool claim(Team& t, Ticket seen, uint32_t& piece) {
  piece = seen.next();
  return t.ticket.compare_exchange_weak(seen.word, seen.word + 1, std::memory_order_acq_rel);
}

void work(Team& t, uint32_t piece) {
  const int64_t from = t.begin + piece * t.piece;
  t.body(from, std::min(from + t.piece, t.end), t.context);
  t.done.fetch_add(1, std::memory_order_release);
}

void serve(int self) {
  number = self;
  Team& t = team();
  const auto mine = [&](Ticket now) { return now.left() && self < now.threads(); };
  for (;;) {
    std::chrono::steady_clock::time_point until;
    for (uint32_t spins = 1;; ++spins) {
      const Ticket now{t.ticket.load(std::memory_order_acquire)};
      uint32_t piece;
      if (mine(now)) {
        if (claim(t, now, piece)) {
          work(t, piece);
          spins = 0;
        }
        continue;
      }
      breathe();
      if (spins % 256) continue;
      const auto time = std::chrono::steady_clock::now();
      if (spins == 256) until = time + kSpin;
      if (time > until) break;
      std::this_thread::yield();  // a neighbour may want the core
    }
    std::unique_lock lock(t.bed);
    t.asleep.fetch_add(1);
    while (!mine(
        Ticket{t.ticket.load()}))  // std::condition_variable::wait of gcc 12 is newer than manylinux_2_28
      pthread_cond_wait(t.bell.native_handle(), t.bed.native_handle());
    t.asleep.fetch_sub(1);
  }
}

}  // namespace

int thread() { return number; }

void run(int threads, int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
         void* context) {
  Team& t = team();
  const int64_t pieces = std::min((end - begin + grain - 1) / grain, int64_t{kPieces} * threads);
  if (threads < 2 || pieces < 2 || number || t.taken.exchange(true, std::memory_order_acquire))
    return body(begin, end, context);
  const Release release{t.taken};
  while (t.workers < threads - 1) std::thread(serve, ++t.workers).detach();
  // Pieces of a multiple of four: the widest tiles take four panels.
  t.piece = (end - begin + pieces - 1) / pieces;
  if (t.piece > 4) t.piece = (t.piece + 3) / 4 * 4;
  t.begin = begin;
  t.end = end;
  t.body = body;
  t.context = context;
  const auto count = static_cast<uint32_t>((end - begin + t.piece - 1) / t.piece);
  t.done.store(0, std::memory_order_relaxed);
  const uint64_t region = (t.ticket.load(std::memory_order_relaxed) >> 40) + 1;
  t.ticket.store(region << 40 | static_cast<uint64_t>(threads - 1) << 32 |
                 static_cast<uint64_t>(count) << 16);
  if (t.asleep.load()) {
    const std::lock_guard wake(t.bed);
    t.bell.notify_all();
  }
  for (Ticket now{t.ticket.load()}; now.left(); now.word = t.ticket.load()) {
    uint32_t piece;
    if (claim(t, now, piece)) work(t, piece);
  }
  for (uint32_t spins = 1; t.done.load(std::memory_order_acquire) < count; ++spins) {
    breathe();
    if (spins % 1024 == 0) std::this_thread::yield();
  }
}

}  // namespace lowbit::cpu::team
