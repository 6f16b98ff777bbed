// A step of a decoder: which linears share quantized rows, where scratch lies, and five parallel regions a
// layer when one row comes (nine when many do). No intrinsics and no arithmetic of its own: all of that is in
// the table.
#include "decoder.h"

#include <algorithm>
#include <cstring>

#include "team.h"

namespace lowbit::cpu {
namespace {
#include "convert.h"

constexpr int64_t kLine = 64;

int64_t width_of(const PackedLinear& l) { return l.groups * l.padded; }
int64_t panels_of(const PackedLinear& l) { return (l.n + kPanel - 1) / kPanel; }

// Whether the rows that one linear reads serve another that has the same x.
bool same_rows(const PackedLinear& a, const PackedLinear& b) {
  const auto same = [&](const void* p, const void* q) {
    return p == q || (p && q && !std::memcmp(p, q, static_cast<size_t>(a.k) * 4));
  };
  return a.k == b.k && a.group == b.group && a.padded == b.padded && a.granularity == b.granularity &&
         a.hadamard == b.hadamard && (!a.down || !b.down || a.wide_down == b.wide_down) &&
         same(a.perm, b.perm) && same(a.smooth, b.smooth);
}

// Scratch, in the order it is carved. A null base measures.
struct Scratch {
  uint8_t* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), kLine);
    return p;
  }
};

struct Buffers {
  float *x, *normed, *added, *q, *k, *v, *mixed, *gate, *up;
  int8_t* codes;
  int32_t* sums;
  float *scales, *floats;
  float* hidden;         // of the low ranks of linears that share rows
  const uint8_t** down;  // their panels
  float* per_thread;
  int64_t thread_floats, bytes;

  Buffers(const Decoder& d, int64_t m, int threads, uint8_t* base) {
    int64_t widest = 0, most_groups = 0, longest = 0, joined = 0, panels = 0;
    bool any_float = false;
    const auto see = [&](const PackedLinear& l) {
      widest = std::max(widest, width_of(l));
      longest = std::max(longest, l.k);
      most_groups = std::max(most_groups, l.groups);
      any_float |= l.granularity == Granularity::kNone;
      joined = l.down_panels + (l.joins ? joined : 0);
      panels = std::max(panels, joined);
    };
    for (const Layer& l : d.layers)
      for (const PackedLinear* p : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) see(*p);
    if (d.head.weight) see(d.head);
    Scratch s{base};
    x = s.take<float>(m * d.hidden);
    normed = s.take<float>(m * d.hidden);
    added = s.take<float>(m * d.hidden);
    q = s.take<float>(m * d.heads * d.head_dim);
    k = s.take<float>(m * d.kv_heads * d.head_dim);
    v = s.take<float>(m * d.kv_heads * d.head_dim);
    mixed = s.take<float>(m * d.heads * d.head_dim);
    gate = s.take<float>(m * d.intermediate);
    up = s.take<float>(m * d.intermediate);
    codes = s.take<int8_t>(m * widest);
    sums = s.take<int32_t>(m * most_groups);
    scales = s.take<float>(m * std::max<int64_t>(most_groups, 1));
    floats = s.take<float>(any_float ? m * widest : 0);
    hidden = s.take<float>(m * panels * kPanel);
    down = s.take<const uint8_t*>(panels);
    const int64_t attention = attention_scratch(std::min(m, kTileRows), d.heads / d.kv_heads, d.head_dim);
    const int64_t rows = widest + kMostRows * round_up(longest, kPanel);  // scratch_floats
    thread_floats = round_up(std::max(rows, attention), kLine / 4);
    per_thread = s.take<float>(thread_floats * threads);
    bytes = s.used;
  }
};

class Run {
 public:
  Run(const Decoder& d, const Step& s, const KernelTable& table, int threads)
      : d_(d), s_(s), table_(table), threads_(threads), b_(d, s.m, threads, s.scratch) {}

  void operator()() {
    embed();
    const float* add = nullptr;
    const int64_t item = s_.half ? 2 : 4, layer_bytes = d_.kv_heads * s_.capacity * d_.head_dim * item;
    for (size_t i = 0; i < d_.layers.size(); ++i) {
      const Layer& l = d_.layers[i];
      const PackedLinear* qkv[] = {&l.q, &l.k, &l.v};
      float* heads[] = {b_.q, b_.k, b_.v};
      norm(l.norm, add, s_.m, 0);
      linears(qkv, heads, 3, b_.normed, s_.m);
      attention(l, static_cast<char*>(s_.keys) + static_cast<int64_t>(i) * layer_bytes,
                static_cast<char*>(s_.values) + static_cast<int64_t>(i) * layer_bytes);
      linear(l.o, b_.mixed, s_.m, b_.added);
      norm(l.mlp_norm, b_.added, s_.m, 0);
      gated(l);
      linear(l.down, b_.gate, s_.m, b_.added);
      add = b_.added;
    }
    if (!s_.last) return;
    const int64_t skip = s_.m - s_.last;
    norm(d_.norm, add, s_.last, skip);
    const float* rows = b_.normed + skip * d_.hidden;
    if (d_.head.weight)
      linear(d_.head, rows, s_.last, s_.out);
    else
      std::memcpy(s_.out, rows, static_cast<size_t>(s_.last * d_.hidden) * 4);
  }

 private:
  template <class F>
  void parallel(int64_t end, int64_t grain, const F& f) const {
    if (end <= grain) return f(0, end);
    team::run(
        threads_, 0, end, grain,
        [](int64_t from, int64_t to, void* context) { (*static_cast<const F*>(context))(from, to); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }
  float* mine() const { return b_.per_thread + team::thread() * b_.thread_floats; }

  void embed() {
    for (int64_t m = 0; m < s_.m; ++m) {
      float* x = b_.x + m * d_.hidden;
      const int64_t at = s_.ids[m] * d_.hidden;
      for (int64_t j = 0; j < d_.hidden; ++j) x[j] = load_one(d_.embedding, d_.embedding_dtype, at + j);
    }
  }

  void norm(const float* weight, const float* add, int64_t m, int64_t skip) {
    const int64_t at = skip * d_.hidden;
    const NormArgs a{b_.x + at, add ? add + at : nullptr, weight, b_.normed + at, d_.hidden, d_.eps};
    parallel(m, 1 + 16384 / d_.hidden, [&](int64_t begin, int64_t end) { table_.add_norm(a, begin, end); });
  }

  // The rows of `count` linears that share them.
  Rows rows_for(const PackedLinear* const* shared, int count, const float* x, int64_t m) const {
    const PackedLinear& l = *shared[0];
    Rows r{};
    r.x = x;
    r.dtype = Dtype::kFloat32;
    r.m = m;
    r.k = l.k;
    r.group = l.group;
    r.groups = l.groups;
    r.padded = l.padded;
    r.perm = l.perm;
    r.smooth = l.smooth;
    r.granularity = l.granularity;
    r.codes = b_.codes;
    r.sums = b_.sums;
    r.scales = b_.scales;
    r.floats = b_.floats;
    r.hadamard = l.hadamard;
    r.down = b_.down;
    r.hidden = b_.hidden;
    for (int i = 0; i < count; ++i) {
      const PackedLinear& one = *shared[i];
      const int64_t bytes = round_up(one.k, 4) * kPanel * (one.wide_down ? 4 : 2);
      for (int64_t p = 0; p < one.down_panels; ++p) b_.down[r.down_panels++] = one.down + p * bytes;
      if (one.down) r.wide_down = one.wide_down;
    }
    return r;
  }
  void quantize(const Rows& r) const {
    const int64_t blocks = (r.m + table_.row_block - 1) / table_.row_block;
    const int64_t grain = 1 + 16384 / (table_.row_block * r.groups * r.padded * (1 + r.down_panels));
    parallel(blocks, grain, [&](int64_t begin, int64_t end) {
      Rows own = r;
      own.scratch = mine();
      table_.quantize_rows(own, begin, end);
    });
  }
  // `before`: panels of `down` that belong to linears before this one.
  void panels(const PackedLinear& l, const Rows& r, int64_t before, float* y, int64_t begin,
              int64_t end) const {
    LinearArgs a{};
    a.rows = &r;
    a.weight = l.weight;
    a.n = l.n;
    a.group_bytes = l.group_bytes;
    a.wide_scales = l.wide_scales;
    a.bias = l.bias;
    a.y = y;
    a.up = l.up;
    a.rank = l.rank;
    a.wide_up = l.wide_up;
    a.hidden = r.hidden + before * kPanel;
    (l.bits == 4 ? table_.linear_w4 : l.bits == 8 ? table_.linear_w8 : table_.linear_f16)(a, begin, end);
  }
  static int64_t grain_of(const Rows& r) { return 1 + 65536 / (r.groups * r.padded * kPanel * r.m); }

  // Linears of one x: those that share rows share a region, the panels of all in one line.
  void linears(const PackedLinear* const* l, float* const* y, int count, const float* x, int64_t m) const {
    for (int first = 0, next = 0; first < count; first = next) {
      int64_t total = 0;
      for (next = first; next < count && (next == first || l[next]->joins); ++next)
        total += panels_of(*l[next]);
      const Rows r = rows_for(l + first, next - first, x, m);
      quantize(r);
      parallel(total, grain_of(r), [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (int i = first; i < next; ++i) {
          const int64_t here = panels_of(*l[i]), from = std::max<int64_t>(begin, 0), to = std::min(end, here);
          if (from < to) panels(*l[i], r, before, y[i], from, to);
          before += l[i]->down_panels;
          begin -= here;
          end -= here;
        }
      });
    }
  }
  void linear(const PackedLinear& l, const float* x, int64_t m, float* y) const {
    const PackedLinear* one = &l;
    linears(&one, &y, 1, x, m);
  }

  // gate <- silu(gate) * up, a few panels at a time while their rows are in the cache.
  void gated(const Layer& l) const {
    if (!l.up.joins) {
      linear(l.gate, b_.normed, s_.m, b_.gate);
      linear(l.up, b_.normed, s_.m, b_.up);
      parallel(s_.m, 1 + 16384 / d_.intermediate, [&](int64_t begin, int64_t end) {
        const int64_t at = begin * d_.intermediate;
        table_.silu_mul(b_.gate + at, b_.up + at, end - begin, d_.intermediate, d_.intermediate);
      });
      return;
    }
    const PackedLinear* both[] = {&l.gate, &l.up};
    const Rows r = rows_for(both, 2, b_.normed, s_.m);
    quantize(r);
    parallel(panels_of(l.gate), 1 + grain_of(r) / 2, [&](int64_t begin, int64_t end) {
      const int64_t strip = s_.m == 1 ? end - begin : kStripPanels;
      for (int64_t p = begin; p < end; p += strip) {
        const int64_t to = std::min(p + strip, end), at = p * kPanel;
        panels(l.gate, r, 0, b_.gate, p, to);
        panels(l.up, r, l.gate.down_panels, b_.up, p, to);
        table_.silu_mul(b_.gate + at, b_.up + at, s_.m, d_.intermediate, (to - p) * kPanel);
      }
    });
  }

  void attention(const Layer& l, void* keys, void* values) const {
    AttentionArgs a{};
    a.q = b_.q;
    a.k = b_.k;
    a.v = b_.v;
    a.m = s_.m;
    a.heads = d_.heads;
    a.kv_heads = d_.kv_heads;
    a.head_dim = d_.head_dim;
    a.position = s_.position;
    a.q_norm = l.q_norm;
    a.k_norm = l.k_norm;
    a.eps = d_.eps;
    a.scale = d_.scale;
    a.cosines = s_.cosines;
    a.sines = s_.sines;
    a.keys = keys;
    a.values = values;
    a.capacity = s_.capacity;
    a.half = s_.half;
    a.out = b_.mixed;
    const int64_t share = d_.heads / d_.kv_heads, seen = s_.position + s_.m;
    // One row has one item a key/value head; where threads would idle over a long cache, one a query head.
    const bool apart = s_.m == 1 && seen >= 512 && d_.kv_heads % threads_;
    a.heads_per_item = apart ? 1 : share;
    parallel(s_.m, 1 + 8192 / (d_.kv_heads * d_.head_dim),
             [&](int64_t begin, int64_t end) { table_.append_rows(a, begin, end); });
    const int64_t rows = std::min(s_.m, kTileRows);
    const int64_t work = rows * a.heads_per_item * d_.head_dim * seen;  // twice that many products an item
    parallel(attention_items(a), 1 + 16384 / work,
             [&](int64_t begin, int64_t end) { table_.attend(a, begin, end, mine()); });
  }

  const Decoder& d_;
  const Step& s_;
  const KernelTable& table_;
  const int threads_;
  const Buffers b_;
};

}  // namespace

void join(Layer& layer) {
  layer.k.joins = same_rows(layer.q, layer.k);
  layer.v.joins = same_rows(layer.k, layer.v) && (!layer.k.joins || same_rows(layer.q, layer.v));
  layer.up.joins = same_rows(layer.gate, layer.up);
}

int64_t scratch_bytes(const Decoder& d, int64_t m, int threads) {
  return Buffers(d, m, threads, nullptr).bytes;
}

void decode_step(const Decoder& d, const Step& s, const KernelTable& table, int threads) {
  Run(d, s, table, threads)();
}

}  // namespace lowbit::cpu
