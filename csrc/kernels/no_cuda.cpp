// The CUDA half of the kernels in a build without CUDA: the same symbols, and one clear sentence.
#include "core/error.h"
#include "kernels/capture.h"
#include "kernels/cast.h"
#include "kernels/pack.h"
#include "kernels/power_iteration.h"
#include "kernels/quantize.h"

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
bool is_capturing(at::Device /*device*/) { return false; }

void pack_cast(const at::Tensor& bucket, std::span<const Segment> /*segments*/, at::ScalarType /*grads*/,
               double /*scale*/) {
  refuse(bucket);
}
void unpack_cast(const at::Tensor& bucket, std::span<const Segment> /*segments*/, at::ScalarType /*grads*/) {
  refuse(bucket);
}

at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& /*layout*/, const at::Tensor& /*error*/,
                           uint32_t /*key*/) {
  refuse(bucket);
}
at::Tensor sum_records(const at::Tensor& received, const BlockLayout& /*layout*/, int64_t /*rank*/,
                       const at::Tensor& /*error*/, uint32_t /*key*/) {
  refuse(received);
}
void dequantize_bucket(const at::Tensor& /*records*/, const BlockLayout& /*layout*/, const at::Tensor& bucket) {
  refuse(bucket);
}

std::unique_ptr<PowerIteration> make_power_iteration(const Matrices& /*matrices*/, const at::Tensor& bucket,
                                                     PowerIteration::Settings /*settings*/) {
  refuse(bucket);
}

}  // namespace lockstep::cuda
