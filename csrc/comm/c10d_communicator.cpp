#include "comm/c10d_communicator.h"

#include <ATen/ATen.h>

#include "compat.h"
#include "core/error.h"

namespace lockstep {
namespace {

using c10d::ReduceOp;

class C10dTransfer final : public Transfer {
 public:
  C10dTransfer(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors)
      : work_(std::move(work)), tensors_(std::move(tensors)) {}

  void wait() override {
    // A false return means an aborted collective whose data is not what anybody asked for.
    if (!work_->wait()) fail("a collective was aborted before it finished; its result must not be used");
    tensors_.clear();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;  // groups written in Python need not keep them alive
};

TransferPtr reduce(c10d::ProcessGroup& group, at::Tensor data, ReduceOp::RedOpType op) {
  std::vector<at::Tensor> tensors{std::move(data)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  auto work = group.allreduce(tensors, options);
  return std::make_unique<C10dTransfer>(std::move(work), std::move(tensors));
}

std::vector<at::Tensor> chunks(const at::Tensor& data, int count) { return data.view({count, -1}).unbind(0); }

}  // namespace

C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), rank_(group_->getRank()), size_(group_->getSize()) {}

std::string C10dCommunicator::name() const { return group_->getBackendName(); }

TransferPtr C10dCommunicator::sum(at::Tensor data) { return reduce(*group_, std::move(data), ReduceOp::SUM); }

TransferPtr C10dCommunicator::max(at::Tensor data) { return reduce(*group_, std::move(data), ReduceOp::MAX); }

TransferPtr C10dCommunicator::broadcast(at::Tensor data, int root) {
  std::vector<at::Tensor> tensors{std::move(data)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  auto work = group_->broadcast(tensors, options);
  return std::make_unique<C10dTransfer>(std::move(work), std::move(tensors));
}

TransferPtr C10dCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  std::vector<std::vector<at::Tensor>> outputs{chunks(output, size_)};
  std::vector<at::Tensor> inputs{input.view(-1)};
  auto work = group_->allgather(outputs, inputs);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

TransferPtr C10dCommunicator::all_to_all(at::Tensor output, at::Tensor input) {
  auto work = compat::all_to_all(*group_, output, input);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

TransferPtr C10dCommunicator::reduce_scatter(at::Tensor output, at::Tensor input) {
  auto work = compat::reduce_scatter(*group_, output, input);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

}  // namespace lockstep
