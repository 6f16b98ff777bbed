#if defined(__aarch64__)
#include <new>
#endif

#include "../decoder.h"
#include "../kernels.h"

namespace lowbit::cpu {
namespace {
#include "../convert.h"
#include "../loops.h"
#include "scalar.simd.h"
#if defined(__aarch64__)
namespace panels {  // hides the dot products of the x86 lines
#include "scalar_panels.simd.h"
#include "../low_rank.body.h"
#include "../quantize_rows.body.h"
#include "../tail.body.h"
#include "../linear_panels.body.h"
#include "../linear_float.body.h"
#include "../decoder.body.h"
}  // namespace panels
using panels::add_norm, panels::append_rows, panels::attend, panels::silu_mul;
using panels::linear_f16, panels::linear_w4, panels::linear_w8, panels::quantize_rows;
#else
#include "../low_rank.body.h"
#include "../quantize_rows.body.h"
#include "../tail.body.h"
#include "../linear_int.body.h"
#include "../linear_float.body.h"
#include "../decoder.body.h"
#endif
}  // namespace
constinit const KernelTable kScalarTable = {"scalar",  kNothing,    kRowBlock,  quantize_rows,
                                            linear_w4, linear_w8,   linear_f16, add_norm,
                                            silu_mul,  append_rows, attend};
}  // namespace lowbit::cpu
