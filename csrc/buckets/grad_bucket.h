// What a comm hook gets to see of one bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/bucket_plan.h"

namespace lockstep {

class GradBuffers;

/// The parameters of one bucket that have elements, and where their gradients lie in it; the same as long as the plan
/// is.
struct BucketMembers {
  std::vector<at::Tensor> params;           ///< In the order of the slots.
  std::vector<size_t> offsets;              ///< In elements; empty for a sparse bucket, like the next two.
  std::vector<size_t> lengths;              ///< In elements.
  std::vector<std::vector<int64_t>> sizes;  ///< Shapes, with a last dimension of 2 where the parameter is complex.
};

/// One bucket, lent to a comm hook until its mean has been published.
struct GradBucket {
  BucketId id{};
  size_t count = 0;  ///< Buckets in the plan; the one with id count - 1 is the last of the step.

  /// 1-D, contiguous, of a real dtype (complex gradients lie in it as pairs), with zeros in the gaps between slots.
  /// For a sparse parameter it is that parameter's gradient.
  at::Tensor memory;

  const GradBuffers* owner = nullptr;

  /// Built at the first call for a plan; hooks that look at the flat memory only never pay for it.
  [[nodiscard]] const BucketMembers& members() const;

  /// "bucket 2 of 5 ('a.weight' (#3) ... 'b.bias' (#7))", for messages.
  [[nodiscard]] std::string describe() const;
};

}  // namespace lockstep
