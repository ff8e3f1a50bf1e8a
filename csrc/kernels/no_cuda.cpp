// The CUDA half of the kernels in a build without CUDA: the same symbols, and one clear sentence.
#include "core/error.h"
#include "kernels/cast.h"
#include "kernels/pack.h"

namespace lockstep::cuda {
namespace {

[[noreturn]] void refuse(const at::Tensor& bucket) {
  fail(Code::kNoCudaKernels,
       "the model is on {}, but this build of lockstep has no CUDA kernels. Rebuild with nvcc on the PATH and a CUDA "
       "build of torch (LOCKSTEP_CUDA=on makes the build say what is missing), or keep the model on the CPU.",
       bucket.device().str());
}

}  // namespace

void pack(const at::Tensor& bucket, std::span<const Segment> /*segments*/, double /*scale*/) { refuse(bucket); }
void unpack(const at::Tensor& bucket, std::span<const Segment> /*segments*/) { refuse(bucket); }

void pack_cast(const at::Tensor& bucket, std::span<const Segment> /*segments*/, at::ScalarType /*grads*/,
               double /*scale*/) {
  refuse(bucket);
}
void unpack_cast(const at::Tensor& bucket, std::span<const Segment> /*segments*/, at::ScalarType /*grads*/) {
  refuse(bucket);
}

}  // namespace lockstep::cuda
