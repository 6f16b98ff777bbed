// What every launcher needs from the runtime.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include "kernels.h"

namespace lowbit::cuda {

// cuTensorMapEncodeTiled through the runtime, so that nothing links against the driver. Rows of 128 B, 128B
// swizzle.
const char* tensor_map(CUtensorMap*, const void* base, int element_bytes, uint64_t inner, uint64_t outer,
                       uint32_t box_inner, uint32_t box_outer);
// Lets a kernel have that much dynamic shared memory, once a device.
const char* allow_shared(const void* kernel, int bytes, const Device&, bool (&allowed)[kMostDevices]);
// Programmatic dependent launch from sm_90 on; `cluster` CTAs a cluster.
const char* start(const void* kernel, int grid, int threads, int shared, int cluster, const Device&, Stream,
                  void** args, int grid_y = 1);

}  // namespace lowbit::cuda
