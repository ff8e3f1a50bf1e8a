// What a C++ program may choose about data parallelism. The names are those of the Python package and of torch DDP.
#pragma once

#include <torch/arg.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/own_communicator.h"

namespace lockstep {

/// Each member sets with one argument and reads without: `Options{}.bucket_cap_mb(100).static_graph(true)`. Equal on
/// all ranks.
class Options {
  /// Size of a bucket in MiB. Empty: 1 for the first and 25 for the others on the CPU; on a GPU by the size of the
  /// model.
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = std::nullopt;
  /// Sizes in MiB of the first, second, ... bucket; the last one repeats. Empty: `bucket_cap_mb`.
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// Backward may reach any subset of the parameters, another one in each step and on each rank.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Backward reaches the same subset, equally often, in every step.
  TORCH_ARG(bool, static_graph) = false;
  /// Gradients are views into the buckets: less memory, no copy. They must not be detached or resized.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Buffers take the values of rank 0 at construction, and before each forward whose backward is reduced, except
  /// between a forward and its backward, which may need the old values.
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// At construction ranks compare their models and take the values of rank 0. Without it they must be equal already.
  TORCH_ARG(bool, init_sync) = true;
  /// With `find_unused_parameters`: buckets that no rank used in the last step are not sent.
  TORCH_ARG(bool, skip_all_reduce_unused_params) = false;
  /// Bucket memory is given back after each step.
  TORCH_ARG(bool, lazy_bucket_allocation) = false;
  /// Qualified names of parameters and buffers that are left alone.
  TORCH_ARG(std::vector<std::string>, ignored_parameters) = {};
  /// Warnings about gradients that stayed on one rank are errors.
  TORCH_ARG(bool, strict) = false;
  /// Compare parameters and buffers over ranks before every so many reduced forwards; 0: never.
  TORCH_ARG(int, check_sync_every) = 0;
  /// A rank that waits for the others longer than this prints who is missing; zero: no monitor.
  TORCH_ARG(std::chrono::milliseconds, stall_threshold) = std::chrono::seconds(30);
  /// Ranks may run different numbers of forwards between two reductions.
  TORCH_ARG(bool, uneven_forwards) = false;
  /// Ranks agree in each step on what they are about to reduce.
  TORCH_ARG(bool, guards) = true;
  /// What carries the collectives.
  TORCH_ARG(CommunicatorKind, communicator) = CommunicatorKind::kAuto;
  /// Settings for `CommunicatorKind::kNccl`, equal on all ranks. The timeout is that of the process group.
  TORCH_ARG(NcclOptions, nccl) = {};
  /// A module without trainable parameters is wrapped too, and simply forwarded.
  TORCH_ARG(bool, allow_passthrough) = false;
};

}  // namespace lockstep
