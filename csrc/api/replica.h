// One copy of the model among N: makes it equal to the others at the start, and keeps its gradients equal after that.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "buckets/grad_buffers.h"
#include "comm/communicator.h"
#include "core/progress.h"
#include "reducer/options.h"
#include "reducer/reducer.h"

namespace lockstep {

/// What both fronts hold. The steps of training are those of `reducer()`.
class Replica {
 public:
  /// Not collective. Starts with the default hook.
  /// @param params    the trainable parameters, in an order that is equal on all ranks.
  /// @param progress  shared with the monitor of `comm`, if it has one.
  Replica(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
          std::shared_ptr<Progress> progress = std::make_shared<Progress>());

  /// Checks that all ranks wrap the same model. Collective.
  /// @throws lockstep::Error  on every rank when they differ, with the first difference.
  void verify_same_model();

  /// From now on our collectives cannot meet the user's, where the communicator can see to that. Collective.
  void isolate();

  /// Overwrites `tensors` (parameters and buffers, any dtypes, on one or several devices) by those of rank `root`,
  /// without touching their version counters. Collective; ranks must bring the same list. Tensors of one dtype and
  /// device travel together, about `chunk_bytes` at a time.
  void copy_from(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes, int root);

  /// Compares `tensors` over ranks by their checksums. Collective; a few bytes per rank when all are equal, 8 bytes per
  /// tensor and rank when not.
  /// @param names  one per tensor.
  /// @throws lockstep::Error  on every rank, with the first tensors that differ and the ranks where they do.
  void assert_in_sync(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names);

  /// Counts forwards whose backward is to be reduced, for logs.
  void count_forward() { ++forwards_; }
  [[nodiscard]] int64_t forwards() const { return forwards_; }

  /// Moves to another set of ranks.
  void reset(std::shared_ptr<Communicator> comm);

  [[nodiscard]] Reducer& reducer() { return *reducer_; }
  [[nodiscard]] Communicator& communicator() { return *comm_; }
  [[nodiscard]] const std::shared_ptr<Progress>& progress() const { return progress_; }

 private:
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Reducer> reducer_;
  std::atomic<int64_t> forwards_ = 0;
};

}  // namespace lockstep
