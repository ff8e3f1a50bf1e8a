#include "kernels/pack.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <cstring>

#include "kernels/for_each_run.h"

namespace lockstep {
namespace {

template <typename T>
void pack_run(const T* grad, T* slot, int64_t numel, double scale) {
  using Math = at::opmath_type<T>;
  if (grad == nullptr) {
    std::memset(slot, 0, static_cast<size_t>(numel) * sizeof(T));
  } else if (scale != 1.0) {
    const Math factor = static_cast<Math>(scale);
    for (int64_t k = 0; k < numel; ++k) slot[k] = static_cast<T>(static_cast<Math>(grad[k]) * factor);
  } else if (grad != slot) {
    std::memcpy(slot, grad, static_cast<size_t>(numel) * sizeof(T));
  }
}

template <typename T>
void unpack_run(T* grad, const T* slot, int64_t numel) {
  if (grad != nullptr && grad != slot) std::memcpy(grad, slot, static_cast<size_t>(numel) * sizeof(T));
}

}  // namespace

void pack(const at::Tensor& bucket, std::span<const Segment> segments, double scale) {
  if (!bucket.is_cpu()) return cuda::pack(bucket, segments, scale);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, bucket.scalar_type(), "lockstep_pack", [&] {
    auto* base = bucket.mutable_data_ptr<scalar_t>();
    for_each_run(segments, [&](const Segment& segment, int64_t first, int64_t count) {
      pack_run(advance<scalar_t>(segment.grad, first), base + segment.offset + first, count, scale);
    });
  });
}

void unpack(const at::Tensor& bucket, std::span<const Segment> segments) {
  if (!bucket.is_cpu()) return cuda::unpack(bucket, segments);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, bucket.scalar_type(), "lockstep_unpack", [&] {
    const auto* base = bucket.const_data_ptr<scalar_t>();
    for_each_run(segments, [&](const Segment& segment, int64_t first, int64_t count) {
      unpack_run(advance<scalar_t>(segment.grad, first), base + segment.offset + first, count);
    });
  });
}

}  // namespace lockstep
