// From tensors to what launches want, and from their status to an error.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/pack.h"

namespace lockstep::cuda {

/// @param bucket  for the message.
/// @throws lockstep::Error  a dtype that no kernel knows.
[[nodiscard]] Element element_of(const at::Tensor& bucket, at::ScalarType type);
[[nodiscard]] inline Element element_of(const at::Tensor& bucket) { return element_of(bucket, bucket.scalar_type()); }

/// Stands for the device of the bucket and its current stream as long as it lives.
class OnDevice {
 public:
  /// @throws lockstep::Error  a device that is not CUDA's.
  explicit OnDevice(const at::Tensor& bucket);
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
  cudaStream_t stream_ = nullptr;
};

/// @param what  was to be launched: "packing of 3 gradients".
/// @throws lockstep::Error  unless `status` is success.
void check(cudaError_t status, const at::Tensor& bucket, const std::string& what);

}  // namespace lockstep::cuda
