// A strategy that turns a bucket of gradients into their mean over ranks. All that the reducer sees of hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "buckets/grad_bucket.h"
#include "comm/communicator.h"

namespace lockstep {

/// The mean of one bucket, on its way.
class PendingMean {
 public:
  virtual ~PendingMean() = default;

  /// Orders what follows after the reduction and returns the mean: a tensor of the bucket's size, in the bucket's own
  /// memory or elsewhere. Its dtype is the bucket's or that of the gradients. May be called once; buckets of a step are
  /// awaited in the order in which they were started, on every rank.
  /// @throws  whatever went wrong on the way.
  virtual at::Tensor wait() = 0;
};

/// What a hook keeps between steps, by name. Those of one parameter end in "/" and the parameter's name.
using HookState = std::map<std::string, at::Tensor>;

/// How much a hook has spared, in elements, over all compressed steps.
struct HookStats {
  int64_t steps = 0;  ///< Passes, compressed or not.
  int64_t numel_before = 0;
  int64_t numel_after = 0;
};

/// A parameter, as far as a hook's state is about it.
struct HookSubject {
  std::string name;
  int64_t numel = 0;  ///< A complex number counts as two.
};

/// The contract of every hook: equal result on all ranks; exact for a world of one; keeps device and shape; `start`
/// does not block the host; an empty bucket is fine; survives a new plan between steps; infinities and NaN reach every
/// rank but no later step.
class CommHook {
 public:
  /// What the bucket holds when `start` is called.
  enum class Input {
    kSummand,    ///< Gradients divided by the number of ranks: their sum is the mean. Costs nothing, packing scales.
    kUndivided,  ///< Gradients as they are: dividing is the hook's own duty (the contract of torch's hooks).
  };

  virtual ~CommHook() = default;

  [[nodiscard]] virtual std::string name() const = 0;
  /// Name and arguments: equal on two ranks exactly when they reduce alike. Ranks compare it.
  [[nodiscard]] virtual std::string signature() const { return name(); }
  [[nodiscard]] virtual Input input() const { return Input::kUndivided; }
  /// Bytes at which slots are aligned in the buckets of this hook; 1 leaves no gaps between gradients.
  [[nodiscard]] virtual int64_t slot_alignment() const { return kSlotAlignmentBytes; }
  /// What gradients are cast to while they are packed: kHalf or kBFloat16, or the dtype that they have. Not asked for
  /// sparse gradients. Must not change between new plans.
  [[nodiscard]] virtual at::ScalarType wire_type(const BucketType& type) const { return type.dtype; }

  /// Issues further collectives after `start` has returned, at times that differ between ranks.
  [[nodiscard]] virtual bool communicates_later() const { return false; }

  /// Starts the reduction of one bucket. Called in the order of the plan, the same on every rank.
  virtual std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) = 0;

  /// The buckets are no longer those of the last step: state keyed by bucket is void.
  virtual void on_new_plan() {}
  /// A pass has ended, on this rank as on every other; whatever came of it.
  virtual void on_pass_ended() {}

  /// Everything that later steps depend on. Between steps only.
  [[nodiscard]] virtual HookState state() const { return {}; }
  /// Takes over what `state` returned, perhaps in another process with other buckets.
  /// @param subjects  the parameters there are now. State of others is dropped.
  /// @return  complaints, a sentence each: what was dropped, and why.
  /// @throws lockstep::Error  it is no state of this hook, or of another model altogether. Nothing has changed then.
  virtual std::vector<std::string> load_state(const HookState& state, std::span<const HookSubject> subjects, int rank);
  [[nodiscard]] virtual HookStats stats() const { return {}; }
};

}  // namespace lockstep
