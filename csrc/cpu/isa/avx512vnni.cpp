#include <immintrin.h>

#include "../kernels.h"

namespace lowbit::cpu {
namespace {
#include "../convert.h"
#include "avx512vnni.simd.h"
#include "../quantize_rows.body.h"
#include "../linear_int.body.h"
#include "../linear_float.body.h"
}  // namespace
constinit const KernelTable kAvx512VnniTable = {"avx512vnni", kAvx512Vnni, kRowBlock, quantize_rows,
                                                linear_w4,    linear_w8,   linear_f16};
}  // namespace lowbit::cpu
