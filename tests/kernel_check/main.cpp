// Kernel tables without torch, for the architecture this is built for.
//
//   kernel_check tiers                     the tiers this CPU runs, best first
//   kernel_check check FILE [TIER]         every tier (or one) on every case of FILE against the definition,
//   byte for byte kernel_check once TIER BITS ACTIVATION M N K GROUP     one call on random bytes, for
//   tests/armcount.py
//
// ACTIVATION: 0 one scale a row, 1 one a group, 2 none (float32). Exit status 1 where a byte differs.
#include <memory>

#include "plain.h"

using namespace lowbit::cpu;

namespace {

template <class T>
struct Buffer {  // on a cache line, and followed by bytes that nothing may touch
  explicit Buffer(int64_t n) : bytes(n * static_cast<int64_t>(sizeof(T))) {
    const int64_t size = round_up(bytes + 64, 64);
    data.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size))));
    std::memset(data.get(), 0xa5, static_cast<size_t>(size));
    end = size;
  }
  bool intact() const {
    for (int64_t i = bytes; i < end; ++i)
      if (static_cast<uint8_t>(data.get()[i]) != 0xa5) return false;
    return true;
  }
  T* get() const { return reinterpret_cast<T*>(data.get()); }
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  int64_t bytes, end = 0;
  std::unique_ptr<char, Free> data;
};

// What torch_ops.cpp does around a table, on one thread, in two ranges of panels so that ranges are tested
// too.
std::vector<uint8_t> run(const KernelTable& table, const Case& c, bool& intact) {
  Rows r{};
  r.dtype = static_cast<Dtype>(c.dtype);
  r.granularity = static_cast<Granularity>(c.granularity);
  r.x = c.x.data();
  r.m = c.m, r.k = c.k, r.group = c.group, r.groups = c.groups(), r.padded = c.padded();
  r.perm = c.has_perm ? c.perm.data() : nullptr;
  r.smooth = c.has_smooth ? c.smooth.data() : nullptr;
  const int64_t width = r.groups * r.padded, size = r.m * width;
  const bool floats = r.granularity == Granularity::kNone;
  const Buffer<int8_t> codes(floats ? 0 : size);
  const Buffer<int32_t> sums(floats ? 0 : r.m * r.groups);
  const Buffer<float> scales(floats ? 0 : r.m * r.groups), wide(floats ? size : 0);
  const int64_t panels_of_down = (c.rank + kPanel - 1) / kPanel;
  std::vector<const uint8_t*> down;
  for (int64_t p = 0; p < panels_of_down; ++p) down.push_back(c.packed_down.data() + p * c.panel_of_down());
  r.hadamard = c.hadamard;
  r.down = down.data(), r.down_panels = panels_of_down, r.wide_down = c.wide_factors;
  const Buffer<float> hidden(r.m * panels_of_down * kPanel), scratch(scratch_floats(r));
  r.hidden = hidden.get();
  r.codes = codes.get(), r.sums = sums.get(), r.scales = scales.get(), r.floats = wide.get();
  r.scratch = scratch.get();
  table.quantize_rows(r, 0, (r.m + table.row_block - 1) / table.row_block);
  LinearArgs a{};
  a.rows = &r;
  const Buffer<uint8_t> weight(static_cast<int64_t>(c.packed.size()));
  std::memcpy(weight.get(), c.packed.data(), c.packed.size());
  a.weight = weight.get();
  a.n = c.n;
  a.group_bytes = c.group_bytes;
  a.wide_scales = c.wide;
  a.bias = c.has_bias ? c.bias.data() : nullptr;
  if (c.rank) a.up = c.packed_up.data(), a.rank = round_up(c.rank, 4);
  a.wide_up = c.wide_factors;
  a.hidden = r.hidden;
  const Buffer<uint8_t> y(c.m * c.n * c.item());
  a.y = y.get();
  const auto kernel = c.bits == 4 ? table.linear_w4 : c.bits == 8 ? table.linear_w8 : table.linear_f16;
  const int64_t panels = (c.n + kPanel - 1) / kPanel;
  kernel(a, 0, panels / 2);
  kernel(a, panels / 2, panels);
  intact = codes.intact() && sums.intact() && scales.intact() && wide.intact() && hidden.intact() &&
           scratch.intact() && y.intact();
  return {y.get(), y.get() + y.bytes};
}

void print(const Case& c) {
  std::printf(
      "bits %ld activation %ld dtype %ld M %ld N %ld K %ld group %ld wide %ld perm %ld smooth %ld bias %ld "
      "hadamard %ld rank %ld",
      long(c.bits), long(c.granularity), long(c.dtype), long(c.m), long(c.n), long(c.k), long(c.group),
      long(c.wide), long(c.has_perm), long(c.has_smooth), long(c.has_bias), long(c.hadamard), long(c.rank));
}

int check(const char* path, const char* tier) {
  Reader reader(path);
  struct Count {
    long cases = 0, bad = 0;
    long long outputs = 0;
  };
  std::vector<Count> counts(static_cast<size_t>(count()));
  for (int64_t i = 0; i < reader.count(); ++i) {
    const Case c = reader.next();
    const std::vector<uint8_t> want = plain(c);
    for (int t = 0; t < count(); ++t) {
      const KernelTable& table = *at(t);
      if (!supported(table) || (tier && std::strcmp(tier, table.name))) continue;
      bool intact = false;
      const std::vector<uint8_t> got = run(table, c, intact);
      Count& n = counts[static_cast<size_t>(t)];
      ++n.cases, n.outputs += c.m * c.n;
      if (intact && got == want) continue;
      if (n.bad++ < 5) {
        size_t first = 0;
        while (first < want.size() && got[first] == want[first]) ++first;
        print(c);
        std::printf(": %s differs%s, first at output %ld\n", table.name,
                    intact ? "" : " and writes past an end", long(first) / long(c.item()));
      }
    }
  }
  bool ok = false, bad = false;
  for (int t = 0; t < count(); ++t) {
    const Count& n = counts[static_cast<size_t>(t)];
    if (!n.cases) continue;
    std::printf("%s: %ld cases, %lld outputs, %ld cases differ\n", at(t)->name, n.cases, n.outputs, n.bad);
    ok = true, bad = bad || n.bad;
  }
  return ok && !bad ? 0 : 1;
}

int once(char** argv) {
  const KernelTable* table = pick(argv[0]);
  if (!table) return std::fprintf(stderr, "this CPU does not run %s\n", argv[0]), 2;
  int64_t v[6];
  for (int i = 0; i < 6; ++i) v[i] = std::atoll(argv[1 + i]);
  Case c{};
  c.bits = v[0], c.granularity = v[1], c.m = v[2], c.n = v[3], c.k = v[4], c.group = v[5];
  const int64_t tail = c.bits == 16 ? 0 : 64;
  c.group_bytes = c.padded() * kPanel * c.bits / 8 + tail;
  c.packed.resize(static_cast<size_t>((c.n + 15) / 16 * c.groups() * c.group_bytes));
  uint32_t state = 1;
  for (uint8_t& b : c.packed) b = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24 & 0x7b);
  std::vector<float> x(static_cast<size_t>(c.m * c.k));
  for (float& f : x)
    f = static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) / 2e9f;
  c.x.resize(4 * x.size());
  std::memcpy(c.x.data(), x.data(), c.x.size());
  bool intact = false;
  return run(*table, c, intact).empty() || !intact;
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  if (!std::strcmp(what, "tiers")) {
    for (int t = 0; t < count(); ++t)
      if (supported(*at(t))) std::puts(at(t)->name);
    return 0;
  }
  if (!std::strcmp(what, "check") && (argc == 3 || argc == 4))
    return check(argv[2], argc == 4 ? argv[3] : nullptr);
  if (!std::strcmp(what, "once") && argc == 9) return once(argv + 2);
  std::fprintf(stderr,
               "usage: kernel_check tiers | check FILE [TIER] | once TIER BITS ACTIVATION M N K GROUP\n");
  return 2;
}
