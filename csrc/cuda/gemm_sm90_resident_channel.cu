#include "gemm_sm90_rows.cuh"
#define MODE kW4Channel
namespace lowbit::cuda {
const Row kResidentChannel[] = {
#include "gemm_sm90_resident.inc"
};
}  // namespace lowbit::cuda
