#include <arm_neon.h>

#include <new>

#include "../decoder.h"
#include "../kernels.h"

namespace lowbit::cpu {
namespace {
#include "../convert.h"
#include "../loops.h"
#include "dotprod.simd.h"
#include "../low_rank.body.h"
#include "../quantize_rows.body.h"
#include "../tail.body.h"
#include "../linear_panels.body.h"
#include "../float_panels.body.h"
#include "../decoder.body.h"
}  // namespace
constinit const KernelTable kDotprodTable = {"dotprod", kDotprod,    kRowBlock,  quantize_rows,
                                             linear_w4, linear_w8,   linear_f16, add_norm,
                                             silu_mul,  append_rows, attend};
}  // namespace lowbit::cpu
