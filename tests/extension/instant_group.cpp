#include "instant_group.h"

#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

namespace lockstep::testing {
namespace {

using c10d::OpType;
using Tensors = InstantBackend::Tensors;

class InstantWork final : public c10d::Work {
 public:
  InstantWork(int rank, OpType type, Tensors outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {
    future_->markCompleted(outputs_);
    finish();
  }

  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

int64_t bytes_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return bytes_of(tensor._indices()) + bytes_of(tensor._values());
  return static_cast<int64_t>(tensor.nbytes());
}

int64_t bytes_of(at::TensorList tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + bytes_of(tensor); });
}

void copy_to_all(const Tensors& outputs, const at::Tensor& input) {
  for (const at::Tensor& output : outputs) output.copy_(input);
}

/// One piece per rank along the first dimension; no splits means equal pieces, as in c10d.
Tensors pieces(const at::Tensor& buffer, const std::vector<int64_t>& splits, int ranks) {
  return splits.empty() ? buffer.tensor_split(ranks) : buffer.split_with_sizes(splits);
}

}  // namespace

InstantBackend::Counts InstantBackend::counts() const {
  const std::scoped_lock lock(mutex_);
  return counts_;
}

void InstantBackend::reset_counts() {
  const std::scoped_lock lock(mutex_);
  counts_.clear();
}

InstantBackend::WorkPtr InstantBackend::finished(const char* name, OpType type, at::TensorList inputs,
                                                 Tensors outputs) {
  {
    const std::scoped_lock lock(mutex_);
    OpCount& count = counts_[name];
    ++count.calls;
    count.bytes += bytes_of(inputs);
  }
  return c10::make_intrusive<InstantWork>(getRank(), type, std::move(outputs));
}

const at::Tensor& InstantBackend::mine(const Tensors& per_rank) const {
  return per_rank.at(static_cast<size_t>(getRank()));
}

InstantBackend::WorkPtr InstantBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& /*options*/) {
  return finished("allreduce", OpType::ALLREDUCE, tensors, tensors);
}

InstantBackend::WorkPtr InstantBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& /*options*/) {
  return finished("allreduce_sparse", OpType::_ALLREDUCE_SPARSE, tensors, tensors);
}

InstantBackend::WorkPtr InstantBackend::allreduce_coalesced(Tensors& tensors,
                                                            const c10d::AllreduceCoalescedOptions& /*options*/) {
  return finished("allreduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, tensors);
}

InstantBackend::WorkPtr InstantBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& /*options*/) {
  return finished("reduce", OpType::REDUCE, tensors, tensors);
}

InstantBackend::WorkPtr InstantBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& /*options*/) {
  return finished("broadcast", OpType::BROADCAST, tensors, tensors);
}

InstantBackend::WorkPtr InstantBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  return finished("barrier", OpType::BARRIER, {}, {});
}

InstantBackend::WorkPtr InstantBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& /*options*/) {
  copy_to_all(outputs.at(0), inputs.at(0));
  return finished("allgather", OpType::ALLGATHER, inputs, outputs[0]);
}

InstantBackend::WorkPtr InstantBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& /*options*/) {
  for (const Tensors& of_rank : outputs) {
    for (size_t i = 0; i < inputs.size(); ++i) of_rank.at(i).copy_(inputs[i]);
  }
  return finished("allgather_coalesced", OpType::ALLGATHER_COALESCED, inputs, outputs.at(0));
}

InstantBackend::WorkPtr InstantBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& /*options*/) {
  output.view({getSize(), -1}).copy_(input.reshape({1, -1}));
  return finished("allgather_base", OpType::_ALLGATHER_BASE, input, {output});
}

InstantBackend::WorkPtr InstantBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::AllgatherOptions& /*options*/) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs.at(i).view({getSize(), -1}).copy_(inputs[i].reshape({1, -1}));
  }
  return finished("allgather_into_tensor_coalesced", OpType::COALESCED, inputs, outputs);
}

InstantBackend::WorkPtr InstantBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& options) {
  if (options.rootRank == getRank()) copy_to_all(outputs.at(0), inputs.at(0));
  return finished("gather", OpType::GATHER, inputs, outputs.empty() ? Tensors() : outputs[0]);
}

InstantBackend::WorkPtr InstantBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                       const c10d::ReduceScatterOptions& /*options*/) {
  outputs.at(0).copy_(mine(inputs.at(0)));
  return finished("reduce_scatter", OpType::REDUCE_SCATTER, inputs[0], outputs);
}

InstantBackend::WorkPtr InstantBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::ReduceScatterOptions& /*options*/) {
  output.view(-1).copy_(input.view({getSize(), -1})[getRank()]);
  return finished("reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, input, {output});
}

InstantBackend::WorkPtr InstantBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::ReduceScatterOptions& /*options*/) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs.at(i).view(-1).copy_(inputs[i].view({getSize(), -1})[getRank()]);
  }
  return finished("reduce_scatter_tensor_coalesced", OpType::COALESCED, inputs, outputs);
}

InstantBackend::WorkPtr InstantBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ScatterOptions& options) {
  const bool is_root = options.rootRank == getRank();
  if (is_root) outputs.at(0).copy_(mine(inputs.at(0)));
  return finished("scatter", OpType::SCATTER, is_root ? inputs[0] : Tensors(), outputs);
}

InstantBackend::WorkPtr InstantBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& /*options*/) {
  copy_to_all(outputs, mine(inputs));
  return finished("alltoall", OpType::ALLTOALL, inputs, outputs);
}

InstantBackend::WorkPtr InstantBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& /*options*/) {
  copy_to_all(pieces(output, output_splits, getSize()), mine(pieces(input, input_splits, getSize())));
  return finished("alltoall_base", OpType::ALLTOALL_BASE, input, {output});
}

c10::intrusive_ptr<c10d::ProcessGroup> make_instant_group(int rank, int world_size) {
  TORCH_CHECK(0 <= rank && rank < world_size, "An instant group needs 0 <= rank < world_size, but got rank ", rank,
              " of ", world_size, ".");
  constexpr auto kCustom = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank, world_size);
  // The backend first: since torch 2.14 a group with a default but no backend throws when asked for its rank.
  group->setBackend(at::kCPU, kCustom, c10::make_intrusive<InstantBackend>(rank, world_size));
  group->setDefaultBackend(kCustom);
  group->setGroupName("instant");
  group->setGroupDesc("instant");
  return group;
}

c10::intrusive_ptr<InstantBackend> instant_backend(c10d::ProcessGroup& group) {
  auto backend = c10::dynamic_intrusive_pointer_cast<InstantBackend>(group.getBackend(at::kCPU));
  TORCH_CHECK(backend, "Counters belong to instant groups only, and this group's CPU backend is '",
              group.getBackend(at::kCPU)->getBackendName(), "'. Use lockstep_testing.instant_group(rank, world_size).");
  return backend;
}

}  // namespace lockstep::testing
