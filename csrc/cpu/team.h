// The threads of a decoder step: about 150 short regions a token, so workers spin from one to the next and
// only sleep when no token follows. Ranges are cut into more pieces than there are threads and taken as
// threads come free: a worker that a neighbour keeps off its core costs its share, not the whole step, for
// the caller never waits for a worker that holds no piece.
#pragma once
#include <cstdint>

namespace lowbit::cpu::team {

constexpr int kMost = 256;  // threads

// body(begin, end, context) over [begin, end), in pieces of at least `grain`, by the caller and up to
// threads - 1 workers, threads in 1 .. kMost. One region runs at a time: a second caller computes alone. A
// child after a fork has no workers and must say 1.
void run(int threads, int64_t begin, int64_t end, int64_t grain,
         void (*body)(int64_t begin, int64_t end, void* context), void* context);

// 0 for a caller, 1 .. threads - 1 for a worker inside body.
int thread();

}  // namespace lowbit::cpu::team
