// The worked example of docs/hooks.md: sends the largest elements only, and adds the rest to the next gradient.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>

#include "hooks/comm_hook.h"
#include "hooks/named_memory.h"
#include "hooks/uncompressed.h"

namespace lockstep {

/// Waits for the elements of all ranks and adds them up.
class SummedElements final : public PendingMean {
 public:
  SummedElements(at::Tensor memory, at::Tensor mine, Communicator& comm)
      : memory_(std::move(memory)),
        mine_(std::move(mine)),
        all_(at::empty({comm.size(), 2, mine_.size(1)}, mine_.options())),
        transfer_(comm.all_gather(all_, mine_)) {}

  at::Tensor wait() override {
    transfer_->wait();
    const at::NoGradGuard no_grad;
    memory_.zero_();
    for (int64_t rank = 0; rank < all_.size(0); ++rank) {  // the same order everywhere: the same bits everywhere
      memory_.index_add_(0, all_[rank][0].to(at::kLong), all_[rank][1].to(memory_.scalar_type()));
    }
    return std::move(memory_);
  }

 private:
  at::Tensor memory_;
  at::Tensor mine_;
  at::Tensor all_;
  TransferPtr transfer_;
};

class TopK final : public CommHook {
 public:
  explicit TopK(double ratio) : ratio_(ratio) {}

  [[nodiscard]] std::string name() const override { return "top_k"; }
  [[nodiscard]] std::string signature() const override { return fmt::format("top_k(ratio={})", ratio_); }
  [[nodiscard]] Input input() const override { return Input::kSummand; }  // packing divides by the number of ranks

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    if (bucket.memory.layout() != at::kStrided) return sum_in_place(bucket, comm);  // a sparse gradient, alone
    const at::NoGradGuard no_grad;
    at::Tensor memory = bucket.memory;
    at::Tensor& error = error_of(bucket);
    memory.add_(error);
    const int64_t k = std::max<int64_t>(1, static_cast<int64_t>(ratio_ * static_cast<double>(memory.numel())));
    const at::Tensor indices = std::get<1>(memory.abs().topk(k));
    const at::Tensor values = memory.index_select(0, indices);
    error.copy_(memory).index_fill_(0, indices, 0);
    // Both are exact as doubles: one tensor, one collective.
    return std::make_unique<SummedElements>(memory, at::stack({indices.to(at::kDouble), values.to(at::kDouble)}), comm);
  }

  void on_new_plan() override { by_bucket_.clear(); }  // `errors_` knows by name what was in it

 private:
  at::Tensor& error_of(const GradBucket& bucket) {
    at::Tensor& error = by_bucket_[bucket.id];
    if (error.defined()) return error;
    const BucketMembers& members = bucket.members();
    std::vector<NamedSlice> slices;
    for (size_t i = 0; i < members.names.size(); ++i) {
      slices.push_back(
          {members.names[i], static_cast<int64_t>(members.offsets[i]), static_cast<int64_t>(members.lengths[i])});
    }
    return error = errors_.lay_out(slices, bucket.memory.numel(), bucket.memory.options());
  }

  double ratio_;
  NamedMemory errors_;
  std::map<BucketId, at::Tensor> by_bucket_;
};

}  // namespace lockstep
