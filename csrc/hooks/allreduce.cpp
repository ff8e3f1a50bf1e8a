// The default hook: one all-reduce of the bucket as it is.
#include <ATen/record_function.h>

#include "hooks/registry.h"

namespace lockstep {
namespace {

class SummedInPlace final : public PendingMean {
 public:
  SummedInPlace(TransferPtr transfer, at::Tensor data) : transfer_(std::move(transfer)), data_(std::move(data)) {}

  at::Tensor wait() override {
    // Profiles show the all-reduce; torch's engine leaves no second event for waiting, and tools count events.
    const at::DisableRecordFunctionGuard unrecorded;
    transfer_->wait();
    return std::move(data_);
  }

 private:
  TransferPtr transfer_;
  at::Tensor data_;
};

class AllReduce final : public CommHook {
 public:
  [[nodiscard]] std::string name() const override { return "allreduce"; }
  [[nodiscard]] Input input() const override { return Input::kSummand; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    return std::make_unique<SummedInPlace>(comm.sum(bucket.memory), bucket.memory);
  }
};

}  // namespace

std::unique_ptr<CommHook> make_allreduce() { return std::make_unique<AllReduce>(); }

}  // namespace lockstep
