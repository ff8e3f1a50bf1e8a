// Small things that kernels with untyped pointers share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lockstep::cuda {
namespace {

template <typename T>
__device__ T* at(void* data, int64_t first) {
  return static_cast<T*>(data) + first;
}

/// Launches and says how that went, without asking for errors of others.
template <typename... Args>
cudaError_t launch_on(cudaStream_t stream, void (*kernel)(Args...), dim3 blocks, int threads, Args... args) {
  void* parameters[] = {&args...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(static_cast<unsigned>(threads)),
                          parameters, 0, stream);
}

[[maybe_unused]] dim3 blocks(int32_t x, int32_t y = 1) { return {static_cast<unsigned>(x), static_cast<unsigned>(y)}; }

}  // namespace
}  // namespace lockstep::cuda
