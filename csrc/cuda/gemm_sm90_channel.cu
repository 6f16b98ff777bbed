#include "gemm_sm90_rows.cuh"
#define MODE kW4Channel
#define W8 0
namespace lowbit::cuda {
const Row kRowsW4Channel[] = {
#include "gemm_sm90_dense.inc"
};
const int kCountW4Channel = sizeof kRowsW4Channel / sizeof kRowsW4Channel[0];
}  // namespace lowbit::cuda
