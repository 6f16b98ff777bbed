// Which table runs. Compiled for the oldest CPU we serve; the only file that asks what this one can do.
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace lowbit::cpu {

static const KernelTable* const kBestFirst[] = {
#if defined(__x86_64__)
    &kAmxTable,    &kAvx512VnniTable, &kAvxVnniTable, &kAvx2Table,
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

// cpuid.(7,0).edx bits 24 and 25: tiles and their int8 products; xcr0 bits 17 and 18: the system saves them.
static bool has_amx() {
  unsigned a = 1, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(c >> 27 & 1)) return false;  // xgetbv
  a = 7, c = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if ((d >> 24 & 3) != 3) return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a >> 17 & 3) == 3;
}

// Linux lets a process use tiles only after it asked, once for all its threads. Asked where the tier may be
// taken or is listed, and not where another is named: from then on a signal needs 8 KB more of stack.
static bool tiles_allowed() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
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
  if ((has & kAvx512Vnni) && has_amx()) has |= kAmx;
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
  if ((table.needs & has) != table.needs) return false;
#if defined(__x86_64__)
  if (table.needs & kAmx) return tiles_allowed();
#endif
  return true;
}

int count() { return static_cast<int>(sizeof(kBestFirst) / sizeof(kBestFirst[0])); }
const KernelTable* at(int i) { return kBestFirst[i]; }

const KernelTable* pick(const char* name) {
  for (const KernelTable* table : kBestFirst)
    if ((!*name || !std::strcmp(table->name, name)) && supported(*table)) return table;
  return nullptr;
}

}  // namespace lowbit::cpu
