// The memory of the buckets, and the two ways between it and the parameters' gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "buckets/grad_bucket.h"
#include "core/bucket_plan.h"
#include "kernels/capture.h"
#include "kernels/pack.h"

namespace lockstep {

/// The parameters of one replica, in the order of ParamId.
struct ParamList {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;  ///< Fully qualified, one per tensor.
  std::vector<bool> sparse;        ///< The gradient is expected to be sparse, one per tensor.

  [[nodiscard]] size_t size() const { return tensors.size(); }
  /// "'layer.weight' (#3)", for messages.
  [[nodiscard]] std::string label(ParamId id) const;
};

/// What the planner needs to know. A kind is a pair of dtype and device, numbered in order of appearance.
[[nodiscard]] std::vector<ParamSpec> specs_of(const ParamList& params);

/// Chooses the gradients that are reduced where they lie: the dense ones of so many bytes or more; empty: none.
void choose_in_place(std::vector<ParamSpec>& specs, std::optional<int64_t> bytes);

/// Where gradients live after a step.
enum class GradPlacement {
  kOwnMemory,   ///< Each gradient keeps the memory that autograd gave it.
  kBucketView,  ///< Each gradient is a tensor on its bucket's memory.
};

/// How long a bucket has memory. Buckets that gradients live in always keep it.
enum class BucketLifetime {
  kTraining,  ///< From the start.
  kStep,      ///< From the moment it is filled until its mean has been published.
};

/// Flat memory for every bucket of a plan. Not thread-safe: the reducer serialises all calls.
///
/// A slot holds its gradient in the memory order of the parameter when that is dense, else row by row (torch's layout
/// contract), so that a gradient with the parameter's strides is one straight copy.
class GradBuffers {
 public:
  /// The dtype in which a bucket is sent. Empty: that of its gradients.
  using WireType = std::function<at::ScalarType(at::ScalarType grads, bool complex)>;

  /// @param params  must outlive this object.
  GradBuffers(const ParamList& params, GradPlacement placement, BucketLifetime lifetime, BucketPlan plan,
              const WireType& wire = {});

  [[nodiscard]] const BucketPlan& plan() const { return *plan_; }

  /// Replaces plan and memory. Gradients that exist are kept: those on bucket memory move to the new memory.
  void adopt(BucketPlan plan, const WireType& wire = {});

  /// How a gradient takes part in a reduction.
  enum class Presence {
    kInside,   ///< As usual; with bucket views it lives in the bucket afterwards.
    kOutside,  ///< Its value is sent, but it must not lie in the bucket, where the reduction would change it.
    kAbsent,   ///< Zeros are sent whatever it holds.
  };
  using PresenceOf = std::function<Presence(ParamId)>;
  using Predicate = std::function<bool(ParamId)>;

  /// Fills the bucket with `scale` times the gradients; one that does not exist counts as zeros.
  /// @param presence  empty: all are inside. Not asked for sparse gradients, which never lie in a bucket.
  /// @throws lockstep::Error  a gradient's dtype, device, shape or layout kind is not its parameter's.
  void absorb(BucketId id, double scale, const PresenceOf& presence);

  /// Hands the mean to the gradients. `mean` has the size of the bucket; it may be other memory than the bucket's, and
  /// of its wire type or that of the gradients.
  /// @param keep  parameters whose gradient must stay as it is; empty: none.
  void publish(BucketId id, const at::Tensor& mean, const Predicate& keep);

  /// A tensor on this parameter's slot in `flat`, with the parameter's shape and layout, and its dtype when `flat` is
  /// of that dtype too.
  /// What is reduced where it lies is returned itself.
  [[nodiscard]] at::Tensor slot_view(const at::Tensor& flat, ParamId id) const;

  /// What a comm hook gets to see.
  [[nodiscard]] GradBucket lend(BucketId id) const;
  [[nodiscard]] const BucketMembers& members(BucketId id) const;
  /// "bucket 2 of 5 ('a.weight' (#3) ... 'b.bias' (#7))".
  [[nodiscard]] std::string describe(BucketId id) const;
  /// What is sent. Undefined while the bucket has no memory.
  [[nodiscard]] const at::Tensor& memory(BucketId id) const { return wire_[index(id)]; }
  /// What is done to buckets now goes into a CUDA graph.
  [[nodiscard]] bool are_captured() const { return cuda::is_capturing(params_->tensors.front().device()); }
  /// A tensor like that, filled with `value`, for a rank that has nothing to send. A sparse one has no entries, or a
  /// first row of `value` where that is not 0.
  [[nodiscard]] at::Tensor stand_in(BucketId id, double value) const;
  /// The same for gradients that are reduced where they lie.
  [[nodiscard]] std::vector<at::Tensor> in_place_stand_ins(BucketId id, double value) const;

 private:
  enum class Direction { kAbsorb, kPublish };

  [[nodiscard]] at::Tensor allocate(BucketId id, at::ScalarType type) const;
  void provide_memory(BucketId id);
  [[nodiscard]] const at::Tensor& first_param(BucketId id) const;
  [[nodiscard]] at::ScalarType grad_type(BucketId id) const;
  [[nodiscard]] bool is_complex(BucketId id) const;
  [[nodiscard]] bool casts(BucketId id) const { return wire_types_[index(id)] != grad_type(id); }
  [[nodiscard]] bool keeps_memory() const {
    return lifetime_ == BucketLifetime::kTraining || placement_ == GradPlacement::kBucketView;
  }

  void move_out(ParamId id);
  [[nodiscard]] at::Tensor empty_grad(ParamId id) const;
  [[nodiscard]] at::Tensor taken_in_place(ParamId id, Presence presence) const;
  void hand_over(ParamId id, bool keep);
  Segment segment_of(ParamId id, Direction direction, const at::Tensor& flat);
  Segment moved(ParamId id, Direction direction, const at::Tensor& flat);
  void absorb_sparse(BucketId id, double scale);
  void check_grad(ParamId id, const at::Tensor& grad, at::Device device) const;
  bool in_slot_order(ParamId id, const at::Tensor& grad) const;

  const ParamList* params_;
  GradPlacement placement_;
  BucketLifetime lifetime_;
  std::vector<std::vector<int64_t>> strides_;  // of a slot, in elements of the parameter's dtype; by ParamId
  std::unique_ptr<const BucketPlan> plan_;     // its address stays the same as long as the plan does
  std::vector<at::ScalarType> wire_types_;     // by BucketId, like the next two
  std::vector<at::Tensor> wire_;               // what is sent
  std::vector<at::Tensor> homes_;              // what gradients live in, with kBucketView: `wire_` unless that is cast
  std::vector<at::Tensor> views_;              // by ParamId; only with kBucketView
  std::vector<at::Tensor> in_place_;           // by ParamId: what is on its way of those reduced where they lie
  std::vector<Segment> segments_;              // scratch of absorb and publish, like the next
  std::vector<at::Tensor> reordered_;          // gradients in the order of their slots, to be cast
  mutable std::vector<std::unique_ptr<const BucketMembers>> members_;  // by BucketId, built on demand
};

}  // namespace lockstep
