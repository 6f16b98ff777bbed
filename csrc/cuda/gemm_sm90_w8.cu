#include "gemm_sm90_rows.cuh"
#define MODE kW8
#define W8 1
namespace lowbit::cuda {
const Row kRowsW8[] = {
#include "gemm_sm90_dense.inc"
};
const int kCountW8 = sizeof kRowsW8 / sizeof kRowsW8[0];
}  // namespace lowbit::cuda
