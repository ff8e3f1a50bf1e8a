#include "hooks/uncompressed.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

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

}  // namespace

bool can_be_compressed(const GradBucket& bucket, const Communicator& comm) {
  return comm.size() > 1 && bucket.memory.numel() != 0 && !bucket.complex && bucket.memory.layout() == at::kStrided;
}

std::unique_ptr<PendingMean> OneAllReduce::start(const GradBucket& bucket, Communicator& comm) {
  return input_ == Input::kSummand ? sum_in_place(bucket, comm) : average_in_place(bucket, comm);
}

std::unique_ptr<PendingMean> sum_in_place(const GradBucket& bucket, Communicator& comm) {
  return std::make_unique<SummedInPlace>(comm.sum(bucket.memory), bucket.memory);
}

std::unique_ptr<PendingMean> average_in_place(const GradBucket& bucket, Communicator& comm) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = bucket.memory;
  memory.div_(comm.size());
  return sum_in_place(bucket, comm);
}

std::unique_ptr<PendingMean> average_together(const GradBucket& bucket, Communicator& comm) {
  if (bucket.memory.is_sparse()) return average_in_place(bucket, comm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = bucket.in_place;
  if (bucket.memory.numel() > 0) tensors.push_back(bucket.memory);
  return std::make_unique<SummedInPlace>(comm.average_all(tensors), bucket.memory);
}

}  // namespace lockstep
