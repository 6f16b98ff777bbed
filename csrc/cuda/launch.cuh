// What every launcher needs from the runtime.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include "kernels.h"

namespace lowbit::cuda {

// cuTensorMapEncodeTiled through the runtime, so that nothing links against the driver. Boxes have rows of
// 128 or 64 B and that swizzle; stride_bytes 0: rows of the tensor lie side by side.
const char* tensor_map(CUtensorMap*, const void* base, int element_bytes, uint64_t inner, uint64_t outer,
                       uint32_t box_inner, uint32_t box_outer, uint64_t stride_bytes = 0);
// Lets a kernel have that much dynamic shared memory, once a device.
const char* allow_shared(const void* kernel, int bytes, const Device&, bool (&allowed)[kMostDevices]);
// Programmatic dependent launch from sm_90 on; `cluster` CTAs a cluster.
const char* start(const void* kernel, int grid, int threads, int shared, int cluster, const Device&, Stream,
                  void** args, int grid_y = 1);

}  // namespace lowbit::cuda
