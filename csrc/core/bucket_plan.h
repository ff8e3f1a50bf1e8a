// Where every gradient lives: which bucket, and where inside it. An immutable value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/ids.h"

namespace lockstep {

/// What the planner must know of one parameter.
struct ParamSpec {
  int64_t numel = 0;         ///< In elements of the wire type (a complex number counts as two); 0 is allowed.
  int64_t element_size = 0;  ///< In bytes, of one such element.
  int kind = 0;              ///< Parameters share a bucket only when their kinds (dtype and device) are equal.
  bool sparse = false;       ///< Its gradient is sparse: it gets a bucket of its own, without memory.
  bool in_place = false;  ///< Its gradient is reduced where it lies: it leaves with its bucket, but has no slot in it.
};

/// Where one gradient lives: elements [offset, offset + numel) of its bucket's 1-D tensor.
struct Slot {
  BucketId bucket{};
  int64_t offset = 0;     ///< In elements, not bytes.
  int64_t numel = 0;      ///< In elements; 0 is allowed.
  bool in_place = false;  ///< The gradient is reduced where it lies; `numel` is 0.
};

/// The parameters that leave together, in the order in which they lie in the bucket.
struct BucketGroup {
  std::vector<ParamId> params;
  int64_t limit_bytes = 0;  ///< The limit that applied when the group was filled.
};

/// One bucket of a plan.
struct Bucket {
  std::vector<ParamId> params;
  int64_t numel = 0;          ///< In elements, padding included; 0 for a sparse bucket.
  int64_t payload_numel = 0;  ///< In elements, without padding: those of its parameters, also when sparse or in place.
  int64_t limit_bytes = 0;
  int kind = 0;
  bool sparse = false;
};

/// Start of a slot in bytes, so that vectorised kernels and views are fast.
inline constexpr int64_t kSlotAlignmentBytes = 128;

/// An assignment of every parameter to exactly one slot. Never changes: a new layout is a new plan.
class BucketPlan {
 public:
  /// Lays out `groups`, already in the order of sending.
  ///
  /// @param params           one per parameter, indexed by ParamId.
  /// @param groups           together a partition of all ParamIds; each of one kind; a sparse one alone in its group.
  /// @param alignment_bytes  each slot starts at a multiple of it; 1 means no padding.
  /// @throws std::invalid_argument  a group breaks one of these rules; the text names the parameter.
  BucketPlan(std::span<const ParamSpec> params, std::vector<BucketGroup> groups,
             int64_t alignment_bytes = kSlotAlignmentBytes);

  [[nodiscard]] size_t num_buckets() const { return buckets_.size(); }
  [[nodiscard]] size_t num_params() const { return slots_.size(); }
  [[nodiscard]] const Bucket& bucket(BucketId id) const { return buckets_[index(id)]; }
  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  [[nodiscard]] const Slot& slot(ParamId id) const { return slots_[index(id)]; }

 private:
  std::vector<Bucket> buckets_;  // indexed by BucketId
  std::vector<Slot> slots_;      // indexed by ParamId
};

}  // namespace lockstep
