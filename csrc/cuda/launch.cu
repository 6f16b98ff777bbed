#include "launch.cuh"

namespace lowbit::cuda {

using Encode = decltype(&cuTensorMapEncodeTiled);
static const char* encoder(Encode* out) {
  static Encode found = nullptr;
  static const cudaError_t error = [] {
    cudaDriverEntryPointQueryResult result;
    return cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&found), 12000,
                                            cudaEnableDefault, &result);
  }();
  *out = found;
  return error != cudaSuccess ? cudaGetErrorString(error)
         : found              ? nullptr
                              : "the driver has no cuTensorMapEncodeTiled (CUDA 12.0 or newer is needed)";
}

const char* tensor_map(CUtensorMap* map, const void* base, int element_bytes, uint64_t inner, uint64_t outer,
                       uint32_t box_inner, uint32_t box_outer, uint64_t stride_bytes) {
  Encode encode;
  if (const char* wrong = encoder(&encode)) return wrong;
  const cuuint64_t size[2] = {inner, outer},
                   stride[1] = {stride_bytes ? stride_bytes : inner * element_bytes};
  const cuuint32_t box[2] = {box_inner, box_outer}, step[2] = {1, 1};
  const CUresult result =
      encode(map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
             const_cast<void*>(base), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_inner * element_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr
                                : "a tensor map was refused (alignment of a tensor: accepted are 16 bytes)";
}

const char* allow_shared(const void* kernel, int bytes, const Device& device, bool (&allowed)[kMostDevices]) {
  if (allowed[device.index]) return nullptr;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  allowed[device.index] = true;
  return nullptr;
}

const char* start(const void* kernel, int grid, int threads, int shared, int cluster, const Device& device,
                  Stream stream, void** args, int grid_y) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid, grid_y), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  int n = 0;
  if (device.capability >= 90) {
    attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[n++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[n].id = cudaLaunchAttributeClusterDimension;
    attributes[n].val.clusterDim.x = cluster;
    attributes[n].val.clusterDim.y = attributes[n].val.clusterDim.z = 1;
    n++;
  }
  config.attrs = attributes, config.numAttrs = n;
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, args);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* query_device(int index, Device* out) {
  static Device known[kMostDevices];  // multiprocessors 0: not asked yet; two threads may ask at once and
                                      // store the same
  if (index < 0 || index >= kMostDevices) return "device index out of range";
  if (!known[index].multiprocessors) {
    int sms = 0, major = 0, minor = 0, shared = 0;
    cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    if (e != cudaSuccess) return cudaGetErrorString(e);
    known[index] = {index, sms, major * 10 + minor, shared};
  }
  *out = known[index];
  return nullptr;
}

}  // namespace lowbit::cuda
