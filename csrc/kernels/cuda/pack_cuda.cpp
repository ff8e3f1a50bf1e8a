// The CUDA half of the kernels: from tensors to pointers, on the current stream of the bucket's device.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/error.h"
#include "kernels/cast.h"
#include "kernels/cuda/cast.h"
#include "kernels/cuda/pack.h"
#include "kernels/pack.h"

namespace lockstep::cuda {
namespace {

Element element_of(const at::Tensor& bucket, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Element::kFloat;
    case at::kDouble:
      return Element::kDouble;
    case at::kHalf:
      return Element::kHalf;
    case at::kBFloat16:
      return Element::kBFloat16;
    default:
      fail(Code::kNoCudaKernels,
           "gradients on {} have dtype {}, which the CUDA kernels do not move: they know float, double, half and "
           "bfloat16. Keep parameters of this dtype on the CPU, or exclude them from the reduction.",
           bucket.device().str(), c10::toString(type));
  }
}

Element element_of(const at::Tensor& bucket) { return element_of(bucket, bucket.scalar_type()); }

/// Stands for the device of the bucket and its current stream as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& bucket) {
    if (!bucket.is_cuda()) {
      fail(Code::kNoCudaKernels,
           "the model is on {}, which lockstep has no kernels for. Move it to a CUDA device or to the CPU.",
           bucket.device().str());
    }
    guard_.set_device(bucket.device());
    stream_ = c10::cuda::getCurrentCUDAStream(bucket.device().index()).stream();
  }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
  cudaStream_t stream_ = nullptr;
};

void check(const Launched& launched, const at::Tensor& bucket, size_t num_segments, const char* what) {
  if (launched.status == cudaSuccess) return;
  (void)cudaGetLastError();  // not to be reported again by the next call of somebody else
  const char* remedy =
      launched.status == cudaErrorNoKernelImageForDevice
          ? "This build has no kernels for this GPU: rebuild with TORCH_CUDA_ARCH_LIST set to its compute capability."
          : "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which.";
  fail(Code::kDeviceFailed, "{} of {} gradients ({} elements of {} on {}) could not be launched: {} ({}). {}", what,
       num_segments, bucket.numel(), c10::toString(bucket.scalar_type()), bucket.device().str(),
       cudaGetErrorString(launched.status), cudaGetErrorName(launched.status), remedy);
}

}  // namespace

void pack(const at::Tensor& bucket, std::span<const Segment> segments, double scale) {
  const OnDevice device(bucket);
  check(launch_pack(bucket.mutable_data_ptr(), segments, element_of(bucket), scale, device.stream()), bucket,
        segments.size(), "packing");
}

void unpack(const at::Tensor& bucket, std::span<const Segment> segments) {
  const OnDevice device(bucket);
  check(launch_unpack(bucket.const_data_ptr(), segments, element_of(bucket), device.stream()), bucket, segments.size(),
        "unpacking");
}

void pack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads, double scale) {
  const OnDevice device(bucket);
  check(launch_pack_cast(bucket.mutable_data_ptr(), segments, element_of(bucket), element_of(bucket, grads), scale,
                         device.stream()),
        bucket, segments.size(), "packing and casting");
}

void unpack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads) {
  const OnDevice device(bucket);
  check(launch_unpack_cast(bucket.const_data_ptr(), segments, element_of(bucket), element_of(bucket, grads),
                           device.stream()),
        bucket, segments.size(), "casting and unpacking");
}

}  // namespace lockstep::cuda
