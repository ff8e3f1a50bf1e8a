// A c10d backend whose collectives are over before they return: a wire of zero length, for tests and benchmarks.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace lockstep::testing {

/// What one operation was asked to do since the last reset.
struct OpCount {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< Contributed by this rank: the tensors that go in, not those that come out.
};

/// One rank of a world whose other ranks exist in name only: any `size`, one process, CPU tensors.
///
/// Reductions (sum, average, whatever is asked) and broadcasts leave the data as it is. Gathers, scatters and
/// all-to-all behave as if every rank held what this one holds, so checks that compare ranks pass.
/// Point-to-point operations are not there and raise as in any backend that lacks them. Any thread may call.
///
/// Overrides the names that torch 2.11 knows; newer releases forward their new names to them.
class InstantBackend final : public c10d::Backend {
 public:
  using Counts = std::map<std::string, OpCount>;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  InstantBackend(int rank, int size) : Backend(rank, size) {}

  /// By name of the operation ("allreduce", "broadcast", ...); operations never called are not listed.
  [[nodiscard]] Counts counts() const;
  void reset_counts();

  const std::string getBackendName() const override { return "instant"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;

 private:
  /// Counts one call and hands out its finished Work, whose future holds `outputs` as a list of tensors.
  WorkPtr finished(const char* name, c10d::OpType type, at::TensorList inputs, Tensors outputs);
  [[nodiscard]] const at::Tensor& mine(const Tensors& per_rank) const;

  mutable std::mutex mutex_;
  Counts counts_;
};

/// A process group over a fresh InstantBackend, not registered with torch.distributed.
/// @throws c10::Error  unless 0 <= rank < world_size.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> make_instant_group(int rank, int world_size);

/// The InstantBackend of `group`.
/// @throws c10::Error  `group` has another backend for CPU tensors.
[[nodiscard]] c10::intrusive_ptr<InstantBackend> instant_backend(c10d::ProcessGroup& group);

}  // namespace lockstep::testing
