// The mean of a bucket as it is: what compressing hooks do with what they do not compress.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "hooks/comm_hook.h"

namespace lockstep {

/// There is something to gain, and to lose: not in a world of one, and not for sparse or complex gradients.
[[nodiscard]] bool can_be_compressed(const GradBucket& bucket, const Communicator& comm);

/// A hook that sends its bucket as it was packed, by one all-reduce: divided by the number of ranks while packing
/// (kSummand), or afterwards as torch does (kUndivided).
class OneAllReduce : public CommHook {
 public:
  OneAllReduce(std::string name, std::string signature, Input input)
      : name_(std::move(name)), signature_(std::move(signature)), input_(input) {}

  [[nodiscard]] std::string name() const final { return name_; }
  [[nodiscard]] std::string signature() const final { return signature_; }
  [[nodiscard]] Input input() const final { return input_; }
  /// A sum of three or more may depend on where in the bucket it lies: as torch does, without gaps.
  [[nodiscard]] int64_t slot_alignment() const final { return input_ == Input::kSummand ? kSlotAlignmentBytes : 1; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override;

 private:
  std::string name_;
  std::string signature_;
  Input input_;
};

/// Sums the bucket's memory over ranks, in place.
std::unique_ptr<PendingMean> sum_in_place(const GradBucket& bucket, Communicator& comm);

/// Divides the bucket's memory by the number of ranks and sums it, in place: torch's `allreduce_hook`, bit for bit.
std::unique_ptr<PendingMean> average_in_place(const GradBucket& bucket, Communicator& comm);

/// Averages the bucket's memory and its gradients in place, as one transfer.
std::unique_ptr<PendingMean> average_together(const GradBucket& bucket, Communicator& comm);

}  // namespace lockstep
