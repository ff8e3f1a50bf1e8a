// A strategy that turns a bucket of gradients into their mean over ranks. All that the reducer sees of hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "buckets/grad_bucket.h"
#include "comm/communicator.h"

namespace lockstep {

/// The mean of one bucket, on its way.
class PendingMean {
 public:
  virtual ~PendingMean() = default;

  /// Orders what follows after the reduction and returns the mean: a tensor of the bucket's size and dtype, in the
  /// bucket's own memory or elsewhere. May be called once.
  /// @throws  whatever went wrong on the way.
  virtual at::Tensor wait() = 0;
};

/// The contract of every hook: equal result on all ranks; exact for a world of one; keeps dtype, device and shape;
/// `start` does not block the host; an empty bucket is fine; survives a new plan between steps.
class CommHook {
 public:
  /// What the bucket holds when `start` is called.
  enum class Input {
    kSummand,    ///< Gradients divided by the number of ranks: their sum is the mean. Costs nothing, packing scales.
    kUndivided,  ///< Gradients as they are: dividing is the hook's own duty (the contract of torch's hooks).
  };

  virtual ~CommHook() = default;

  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual Input input() const { return Input::kUndivided; }
  /// Bytes at which slots are aligned in the buckets of this hook; 1 leaves no gaps between gradients.
  [[nodiscard]] virtual int64_t slot_alignment() const { return kSlotAlignmentBytes; }

  /// Issues further collectives after `start` has returned, at times that differ between ranks.
  [[nodiscard]] virtual bool communicates_later() const { return false; }

  /// Starts the reduction of one bucket. Called in the order of the plan, the same on every rank.
  virtual std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) = 0;

  /// The buckets are no longer those of the last step: state keyed by bucket is void.
  virtual void on_new_plan() {}
};

}  // namespace lockstep
