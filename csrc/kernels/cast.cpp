#include "kernels/cast.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <cstring>
#include <type_traits>

#include "kernels/for_each_run.h"

namespace lockstep {
namespace {

template <typename To, typename From>
To cast(From value) {
  if constexpr (std::is_same_v<To, double>) {
    return static_cast<double>(value);
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

template <typename From, typename To>
void cast_run(const From* from, To* to, int64_t numel, double scale) {
  using Math = std::conditional_t<std::is_same_v<From, double>, double, float>;
  if (from == nullptr) {
    std::memset(static_cast<void*>(to), 0, static_cast<size_t>(numel) * sizeof(To));
  } else if (scale == 1.0) {
    for (int64_t k = 0; k < numel; ++k) to[k] = cast<To>(from[k]);
  } else {
    const Math factor = static_cast<Math>(scale);
    for (int64_t k = 0; k < numel; ++k) to[k] = cast<To>(static_cast<Math>(from[k]) * factor);
  }
}

/// Calls `body(bucket's type, gradients' type)` with a value of each.
template <typename Body>
void for_types(at::ScalarType bucket, at::ScalarType grads, const Body& body) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, bucket, "lockstep_cast_bucket", [&] {
    using Bucket = scalar_t;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grads, "lockstep_cast_grads",
                                    [&] { body(Bucket(), scalar_t()); });
  });
}

}  // namespace

void pack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads, double scale) {
  if (!bucket.is_cpu()) return cuda::pack_cast(bucket, segments, grads, scale);
  for_types(bucket.scalar_type(), grads, [&](auto of_bucket, auto of_grads) {
    using Bucket = decltype(of_bucket);
    using Grad = decltype(of_grads);
    auto* base = bucket.mutable_data_ptr<Bucket>();
    for_each_run(segments, [&](const Segment& segment, int64_t first, int64_t count) {
      cast_run(advance<const Grad>(segment.grad, first), base + segment.offset + first, count, scale);
    });
  });
}

void unpack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads) {
  if (!bucket.is_cpu()) return cuda::unpack_cast(bucket, segments, grads);
  for_types(bucket.scalar_type(), grads, [&](auto of_bucket, auto of_grads) {
    using Bucket = decltype(of_bucket);
    using Grad = decltype(of_grads);
    const auto* base = bucket.const_data_ptr<Bucket>();
    for_each_run(segments, [&](const Segment& segment, int64_t first, int64_t count) {
      if (segment.grad != nullptr)
        cast_run(base + segment.offset + first, advance<Grad>(segment.grad, first), count, 1);
    });
  });
}

}  // namespace lockstep
