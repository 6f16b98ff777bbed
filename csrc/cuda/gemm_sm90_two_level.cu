#include "gemm_sm90_rows.cuh"
#define MODE kW4TwoLevel
#define W8 0
namespace lowbit::cuda {
const Row kRowsW4TwoLevel[] = {
#include "gemm_sm90_dense.inc"
};
const int kCountW4TwoLevel = sizeof kRowsW4TwoLevel / sizeof kRowsW4TwoLevel[0];
}  // namespace lowbit::cuda
