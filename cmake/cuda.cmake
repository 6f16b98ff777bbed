# The second library, _cuda13: CUDA kernels behind the same operator namespace, loaded only where torch has CUDA 13.
# nvcc compiles the kernels without a GPU; CMake's own CUDA language is not used, which wants a whole toolkit.
set(LOWBIT_CUDA AUTO CACHE STRING "build the CUDA kernels: ON, OFF, or AUTO (where nvcc 13 is found)")
set_property(CACHE LOWBIT_CUDA PROPERTY STRINGS AUTO ON OFF)
if(LOWBIT_CUDA STREQUAL "OFF" OR NOT CMAKE_SYSTEM_PROCESSOR STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  return()
endif()
if(NOT LOWBIT_NVCC)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c
    "import sysconfig; print(sysconfig.get_path('purelib') + '/nvidia/cu13/bin', end='')" OUTPUT_VARIABLE wheel_bin ERROR_QUIET)
  find_program(LOWBIT_NVCC nvcc HINTS ${wheel_bin} ENV CUDA_HOME PATH_SUFFIXES bin)
endif()
set(nvcc_version 0)
if(LOWBIT_NVCC)
  execute_process(COMMAND ${LOWBIT_NVCC} --version OUTPUT_VARIABLE said ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+)" _ "${said}")
  set(nvcc_version ${CMAKE_MATCH_1})
endif()
if(NOT nvcc_version EQUAL 13)
  if(LOWBIT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOWBIT_CUDA=ON: found nvcc '${LOWBIT_NVCC}' of release ${nvcc_version}, accepted is 13 (requirements/cuda.txt)")
  endif()
  message(STATUS "lowbit: no nvcc 13, so no CUDA kernels")
  return()
endif()
message(STATUS "lowbit: CUDA kernels with ${LOWBIT_NVCC}")

# One line a file: the chips it is compiled for. 8.0 code runs on 8.6 and 8.9; the PTX serves chips newer than Hopper.
set(arch_portable 80 90 90-virtual)
set(arch_hopper 90a)
set(cuda_launch 80)
set(cuda_quantize ${arch_portable})
set(cuda_gemv ${arch_portable})
set(cuda_gemm_int4 80 86 89 90)
set(cuda_dequantize ${arch_portable})
set(cuda_norm_rope ${arch_portable})
set(cuda_gemm_mma 80 90-virtual)
set(cuda_gemm_sm90 90a)
set(cuda_gemm_sm90_w8 ${arch_hopper})
set(cuda_gemm_sm90_channel ${arch_hopper})
set(cuda_gemm_sm90_two_level ${arch_hopper})
set(cuda_gemm_sm90_group ${arch_hopper})
set(cuda_gemm_sm90_resident_channel ${arch_hopper})
set(cuda_gemm_sm90_resident_two_level ${arch_hopper})

file(GLOB cuda_headers ${CMAKE_SOURCE_DIR}/csrc/cuda/*.cuh ${CMAKE_SOURCE_DIR}/csrc/cuda/*.h ${CMAKE_SOURCE_DIR}/csrc/cuda/*.inc)
set(cuda_objects "")
# The longest first, so that two cores end together.
foreach(name quantize gemm_sm90_resident_two_level gemm_sm90_resident_channel gemm_sm90_two_level gemm_sm90_channel gemm_sm90_w8 gemm_sm90_group gemm_mma gemm_int4 gemv norm_rope dequantize gemm_sm90 launch)
  set(code "")
  foreach(arch ${cuda_${name}})
    string(REGEX REPLACE "-virtual" "" number ${arch})
    if(arch MATCHES "virtual")
      list(APPEND code -gencode=arch=compute_${number},code=compute_${number})
    else()
      list(APPEND code -gencode=arch=compute_${number},code=sm_${number})
    endif()
  endforeach()
  set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
  add_custom_command(OUTPUT ${object} DEPENDS csrc/cuda/${name}.cu ${cuda_headers} COMMENT "nvcc ${name}" VERBATIM
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${LOWBIT_NVCC} -c -std=c++20 -O3 -fmad=false ${code} -ccbin ${CMAKE_CXX_COMPILER} -Xptxas=-v
      -Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique,-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=
      ${CMAKE_SOURCE_DIR}/csrc/cuda/${name}.cu -o ${object} > ${CMAKE_BINARY_DIR}/cuda/${name}.log 2>&1
      || ${CMAKE_COMMAND} -E cat ${CMAKE_BINARY_DIR}/cuda/${name}.log && test -f ${object})
  list(APPEND cuda_objects ${object})
endforeach()

add_library(_cuda13 MODULE csrc/torch_ops_cuda.cpp ${cuda_objects})
set_source_files_properties(${cuda_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
# An empty library of that name gives the DT_NEEDED; torch has loaded the real one before ours comes.
file(WRITE ${CMAKE_BINARY_DIR}/stub_cudart.cpp "")
add_library(stub_cudart SHARED ${CMAKE_BINARY_DIR}/stub_cudart.cpp)
set_target_properties(stub_cudart PROPERTIES PREFIX "" OUTPUT_NAME libcudart SUFFIX ".so.13" NO_SONAME ON
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/stub)
target_link_options(stub_cudart PRIVATE -Wl,-soname,libcudart.so.13)
target_link_libraries(_cuda13 PRIVATE -Wl,--no-as-needed stub_cudart)
