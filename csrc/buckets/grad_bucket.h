// What a comm hook gets to see of one bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/bucket_plan.h"

namespace lockstep {

class GradBuffers;

/// What a hook may know of a bucket before it is filled.
struct BucketType {
  at::ScalarType dtype{};  ///< Of the gradients; a complex one counts as its real type.
  bool complex = false;    ///< The elements are pairs: real and imaginary parts.
  int ranks = 1;           ///< Of the world that reduces it.
};

/// The parameters of one bucket that have elements, and where their gradients lie in it; the same as long as the plan
/// is.
struct BucketMembers {
  std::vector<std::string> names;  ///< Fully qualified, in the order of the slots, like all the others.
  std::vector<at::Tensor> params;
  std::vector<size_t> offsets;              ///< In elements; empty for a sparse bucket, like the next two.
  std::vector<size_t> lengths;              ///< In elements.
  std::vector<std::vector<int64_t>> sizes;  ///< Shapes, with a last dimension of 2 where the parameter is complex.
};

/// One bucket, lent to a comm hook until its mean has been published.
struct GradBucket {
  BucketId id{};
  size_t count = 0;  ///< Buckets in the plan; the one with id count - 1 is the last of the step.

  /// 1-D, contiguous, of a real dtype (complex gradients lie in it as pairs), with zeros in the gaps between slots.
  /// For a sparse parameter it is that parameter's gradient. Of the hook's wire type.
  at::Tensor memory;
  bool complex = false;  ///< The elements of `memory` are pairs: real and imaginary parts.

  const GradBuffers* owner = nullptr;

  /// Built at the first call for a plan; hooks that look at the flat memory only never pay for it.
  [[nodiscard]] const BucketMembers& members() const;

  /// "bucket 2 of 5 ('a.weight' (#3) ... 'b.bias' (#7))", for messages.
  [[nodiscard]] std::string describe() const;
};

}  // namespace lockstep
