// The elements of buckets, as numbers to calculate with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace lockstep::cuda {
namespace {

__device__ inline float as_float(float value) { return value; }
__device__ inline float as_float(double value) { return static_cast<float>(value); }
__device__ inline float as_float(__half value) { return __half2float(value); }
__device__ inline float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename To>
__device__ To from_float(float value) {
  return static_cast<To>(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

}  // namespace
}  // namespace lockstep::cuda
