#include "kernels/cuda/on_device.h"

#include "core/error.h"

namespace lockstep::cuda {

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

OnDevice::OnDevice(const at::Tensor& bucket) {
  if (!bucket.is_cuda()) {
    fail(Code::kNoCudaKernels,
         "the model is on {}, which lockstep has no kernels for. Move it to a CUDA device or to the CPU.",
         bucket.device().str());
  }
  guard_.set_device(bucket.device());
  stream_ = c10::cuda::getCurrentCUDAStream(bucket.device().index()).stream();
}

void check(cudaError_t status, const at::Tensor& bucket, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // not to be reported again by the next call of somebody else
  const char* remedy =
      status == cudaErrorNoKernelImageForDevice
          ? "This build has no kernels for this GPU: rebuild with TORCH_CUDA_ARCH_LIST set to its compute capability."
          : "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which.";
  fail(Code::kDeviceFailed, "{} ({} elements of {} on {}) could not be launched: {} ({}). {}", what, bucket.numel(),
       c10::toString(bucket.scalar_type()), bucket.device().str(), cudaGetErrorString(status), cudaGetErrorName(status),
       remedy);
}

}  // namespace lockstep::cuda
