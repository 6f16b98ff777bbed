// The cases that vectors.py wrote: plain values beside what lowbit's own packer made of them.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

struct Case {
  int64_t bits;  // 4, 8, 16
  int64_t granularity, dtype, m, n, k, group, wide, has_perm, has_smooth, has_bias, group_bytes;
  int64_t hadamard, rank, wide_factors;
  std::vector<uint8_t> codes;  // [n, k] unsigned codes; bits 16: float16 [n, k]
  std::vector<uint8_t> zeros;  // [n, groups]
  std::vector<float> scales;   // [n, groups]
  std::vector<uint8_t> x;      // [m, k] of dtype
  std::vector<int32_t> perm;
  std::vector<float> smooth, bias;
  std::vector<float> down, up;  // [k, rank], [n, rank]
  std::vector<uint8_t> packed, packed_down, packed_up;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t padded() const { return lowbit::cpu::round_up(group, bits == 16 ? 4 : lowbit::cpu::kStep); }
  int64_t item() const { return dtype == 0 ? 4 : 2; }
  int64_t panel_of_down() const { return lowbit::cpu::round_up(k, 4) * 16 * (wide_factors ? 4 : 2); }
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    int64_t head[2];
    if (!file_) fail("cannot be opened");
    take(head, sizeof(head));
    if (head[0] != 0x6c627631) fail("is no file of cases");
    count_ = head[1];
  }
  ~Reader() { std::fclose(file_); }
  int64_t count() const { return count_; }
  Case next() {
    Case c{};
    take(&c.bits, 15 * sizeof(int64_t));
    vector(c.codes, c.n * c.k * (c.bits == 16 ? 2 : 1));
    if (c.bits != 16) vector(c.zeros, c.n * c.groups()), vector(c.scales, c.n * c.groups());
    vector(c.x, c.m * c.k * c.item());
    if (c.has_perm) vector(c.perm, c.k);
    if (c.has_smooth) vector(c.smooth, c.k);
    if (c.has_bias) vector(c.bias, c.n);
    vector(c.down, c.k * c.rank), vector(c.up, c.n * c.rank);
    vector(c.packed, (c.n + 15) / 16 * c.groups() * c.group_bytes);
    const int64_t item = c.wide_factors ? 4 : 2;
    vector(c.packed_down, (c.rank + 15) / 16 * c.panel_of_down());
    vector(c.packed_up, (c.n + 15) / 16 * 16 * lowbit::cpu::round_up(c.rank, 4) * item);
    return c;
  }

 private:
  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "vectors: the file %s\n", what);
    std::exit(2);
  }
  void take(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, file_) != bytes) fail("ends too early");
  }
  template <class T>
  void vector(std::vector<T>& v, int64_t n) {
    v.resize(static_cast<size_t>(n));
    if (n) take(v.data(), sizeof(T) * static_cast<size_t>(n));
  }
  std::FILE* file_;
  int64_t count_ = 0;
};
