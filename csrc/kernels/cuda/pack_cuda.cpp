// The CUDA half of packing: from tensors to pointers, on the current stream of the bucket's device.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include "kernels/cast.h"
#include "kernels/cuda/cast.h"
#include "kernels/cuda/on_device.h"
#include "kernels/cuda/pack.h"
#include "kernels/pack.h"

namespace lockstep::cuda {
namespace {

void check(const Launched& launched, const at::Tensor& bucket, size_t num_segments, const char* what) {
  if (launched.status == cudaSuccess) return;
  cuda::check(launched.status, bucket, fmt::format("{} of {} gradients", what, num_segments));
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
