// Which table runs. Compiled for the oldest CPU we serve; the only file that asks what this one can do.
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "kernels.h"

namespace lowbit::cpu {

// The place of amx is before avx512vnni.
static const KernelTable* const kBestFirst[] = {
#if defined(__x86_64__)
    &kAvx512VnniTable,
    &kAvxVnniTable,
    &kAvx2Table,
#elif defined(__aarch64__)
    &kI8mmTable,
    &kDotprodTable,
    &kNeonTable,
#endif
    &kScalarTable,
};

#if defined(__x86_64__)
// cpuid.(7,1).eax bit 4: gcc 12 has no name for AVX-VNNI in __builtin_cpu_supports. The ymm state that it
// also needs is what "avx2" asks the system for.
static bool has_avxvnni() {
  unsigned a = 7, b = 0, c = 1, d = 0;
  unsigned top = 0, b0, c0, d0;
  __asm__("cpuid" : "=a"(top), "=b"(b0), "=c"(c0), "=d"(d0) : "a"(0), "c"(0));
  if (top < 7) return false;
  unsigned subleaves = 7;
  __asm__("cpuid" : "+a"(subleaves), "=b"(b0), "=c"(c0), "=d"(d0) : "c"(0));
  if (subleaves < 1) return false;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return a >> 4 & 1;
}

// cpuid.1.ecx bit 29: gcc 12 has no name for F16C either.
static bool has_f16c() {
  unsigned a = 1, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return c >> 29 & 1;
}
#endif

#if defined(__aarch64__) && defined(__APPLE__)
static bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
#endif

static unsigned cpu_has() {
  unsigned has = kNothing;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) has |= kAvx2;
  if ((has & kAvx2) && has_avxvnni()) has |= kAvxVnni;
  if ((has & kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    has |= kAvx512Vnni;
#elif defined(__aarch64__) && defined(__linux__)
  // HWCAP_ASIMDDP and HWCAP2_I8MM by number: the headers of older systems lack the names.
  if (getauxval(AT_HWCAP) >> 20 & 1) has |= kDotprod;
  if ((has & kDotprod) && (getauxval(AT_HWCAP2) >> 13 & 1)) has |= kI8mm;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (has_feature("hw.optional.arm.FEAT_DotProd")) has |= kDotprod;
  if ((has & kDotprod) && has_feature("hw.optional.arm.FEAT_I8MM")) has |= kI8mm;
#endif
  return has;
}

bool supported(const KernelTable& table) {
  static const unsigned has = cpu_has();
  return (table.needs & has) == table.needs;
}

int count() { return static_cast<int>(sizeof(kBestFirst) / sizeof(kBestFirst[0])); }
const KernelTable* at(int i) { return kBestFirst[i]; }

const KernelTable* pick(const char* name) {
  for (const KernelTable* table : kBestFirst)
    if (supported(*table) && (!*name || !std::strcmp(table->name, name))) return table;
  return nullptr;
}

}  // namespace lowbit::cpu
