// Joining the other processes from a C++ program: torchrun's, mpirun's or srun's, or started by hand.
#pragma once

#include <torch/arg.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/launch.h"
#include "lockstep/meeting.h"

namespace lockstep {

/// How processes join. Equal on all ranks, except for `interface`.
class GroupOptions {
  /// "gloo" or "nccl"; empty: NCCL where each process of this machine has a GPU of its own, else gloo.
  TORCH_ARG(std::string, backend) = "";
  /// For each collective, and for barriers that say nothing else.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(10);
  /// For all ranks to be there.
  TORCH_ARG(std::chrono::milliseconds, start_timeout) = std::chrono::minutes(5);
  /// Network interfaces of gloo, by name, with commas between. Empty: the environment variable GLOO_SOCKET_IFNAME, else
  /// the interface that leads to MASTER_ADDR.
  TORCH_ARG(std::string, interface) = "";
  /// Without any launcher: a world of one process instead of an error.
  TORCH_ARG(bool, allow_single) = false;
  /// Tells two groups apart that one process makes with stores of its own.
  TORCH_ARG(std::string, name) = "lockstep";
};

/// The ranks that train together: a handle, cheap to copy. Empty (false) on ranks that are not in the group.
///
/// Collectives of your own go through `c10d()`, in the same order on every rank. When the last handle of a world and of
/// its subgroups goes, ranks wait for each other, up to 10 s, and then end their connections together: so none of them
/// loses the store or a collective that it still needs. A rank that leaves because of an exception does not wait, and
/// aborts its collectives. Connections of a subgroup stay open until the world ends. One thread at a time may use a
/// group.
class ProcessGroup {
 public:
  /// A group without this rank.
  ProcessGroup() = default;

  [[nodiscard]] explicit operator bool() const { return state_ != nullptr; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// Among the processes of this machine; 0 where nobody said.
  [[nodiscard]] int local_rank() const;
  /// "gloo" or "nccl".
  [[nodiscard]] const std::string& backend() const;
  /// Where this rank's model belongs: its GPU, which is also the current one, with NCCL, and the CPU with gloo.
  [[nodiscard]] at::Device device() const;
  [[nodiscard]] std::chrono::milliseconds timeout() const;
  /// Of no more use when the last handle has gone.
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const;
  /// Shared by the ranks of the group; keys of your own must not begin with "lockstep".
  [[nodiscard]] const c10::intrusive_ptr<c10d::Store>& store() const;

  /// Where the ranks of this group say a word each under `key`, which no other meeting of theirs has.
  [[nodiscard]] Meeting meeting(const std::string& key, const std::string& what) const;

  /// Waits until all ranks are here. Talks through the store: it does not wait for GPUs. Collective.
  /// @param timeout  zero: that of the group.
  /// @throws lockstep::Error  a rank did not come in time; names the ranks that are missing.
  void barrier(std::chrono::milliseconds timeout = {}) const;

  /// A group of some of these ranks, numbered in the order given. Collective over all ranks of this group, with equal
  /// arguments; empty on ranks that are not in it.
  /// @throws lockstep::Error  on every rank: ranks gave different lists, a rank is unknown or named twice, or one did
  /// not
  ///                          come in time.
  [[nodiscard]] ProcessGroup new_group(const std::vector<int>& ranks) const;

 private:
  friend ProcessGroup init_process_group(const Launch&, const GroupOptions&, c10::intrusive_ptr<c10d::Store>);
  struct State;
  explicit ProcessGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}
  [[nodiscard]] const State& state() const;
  std::shared_ptr<State> state_;
};

/// Joins the other processes of this run, wherever they were started; see `read_launch` for the variables. Collective.
/// May be called again in the same process, on every rank alike.
///
/// @throws lockstep::Error  a variable is missing or makes no sense; a rank did not come within `start_timeout`
/// (named); a
///                          backend is unknown, differs between ranks, or is NCCL without a GPU for each rank (on every
///                          rank); or an interface does not exist.
[[nodiscard]] ProcessGroup init_process_group_from_env(const GroupOptions& options = {});

/// The same for a place that the program knows by itself. Thread-safe: ranks may be threads of one process, if the
/// environment variable TORCH_FR_BUFFER_SIZE is 0 (torch's flight recorder is not safe for threads with a gloo group
/// each).
/// @param store  where the ranks meet; null: the one that `launch` says. Not used by another group.
[[nodiscard]] ProcessGroup init_process_group(const Launch& launch, const GroupOptions& options = {},
                                              c10::intrusive_ptr<c10d::Store> store = nullptr);

}  // namespace lockstep
