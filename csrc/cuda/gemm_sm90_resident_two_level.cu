#include "gemm_sm90_rows.cuh"
#define MODE kW4TwoLevel
namespace lowbit::cuda {
const Row kResidentTwoLevel[] = {
#include "gemm_sm90_resident.inc"
};
}  // namespace lowbit::cuda
