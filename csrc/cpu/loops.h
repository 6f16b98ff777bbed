// Loops over what a tile must know when it is compiled. Included into the namespace of a tier.

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

// f(Number<n>()) for n in 1 .. kMost, kMost <= 8: the rows of x that one block has.
template <int kMost, class Do>
__attribute__((always_inline)) static inline void with_number(int64_t n, const Do& f) {
  static_assert(kMost <= 8);
  switch (n) {
#define LOWBIT_CASE(N)                          \
  case N:                                       \
    if constexpr (N <= kMost) f(Number<(N)>()); \
    break
    LOWBIT_CASE(1);
    LOWBIT_CASE(2);
    LOWBIT_CASE(3);
    LOWBIT_CASE(4);
    LOWBIT_CASE(5);
    LOWBIT_CASE(6);
    LOWBIT_CASE(7);
    LOWBIT_CASE(8);
#undef LOWBIT_CASE
  }
}

// f(Number<P>(), panel), then what is left one at a time: f(Number<1>(), panel).
template <int P, class Do>
__attribute__((always_inline)) static inline void by_panels(int64_t begin, int64_t end, const Do& f) {
  for (; begin + P <= end; begin += P) f(Number<P>(), begin);
  if constexpr (P > 1)
    for (; begin < end; ++begin) f(Number<1>(), begin);
}
