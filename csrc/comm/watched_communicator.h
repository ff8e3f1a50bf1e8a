// A communicator whose waits end: while a collective is awaited, the monitor may find that it never comes.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"
#include "comm/monitor.h"
#include "comm/own_communicator.h"

namespace lockstep {

/// What `monitor` finds out about a collective that failed with this text. May take seconds.
/// @param lost  NCCL lost another rank, and no collective can follow. They are aborted first, because c10d's watchdog
///              may end the process.
[[nodiscard]] Monitor::Cause cause_of(Monitor& monitor, const std::string& text, bool lost);

/// Makes the communicator that `isolate` moves to, or null to stay. Collective.
using MakeOwn = std::function<std::shared_ptr<Communicator>()>;

/// Passes every call on. Waits for host collectives are interrupted ten times a second to ask the monitor; when a
/// collective fails, the error says what the monitor knows about the other ranks. Safe to destroy before its transfers.
///
/// @param monitor  null: waits are those of `inner`.
[[nodiscard]] std::shared_ptr<Communicator> watched(std::shared_ptr<Communicator> inner,
                                                    std::shared_ptr<Monitor> monitor, MakeOwn make_own = {});

struct WatchOptions {
  std::chrono::milliseconds threshold{30'000};  ///< Of the monitor; zero or less: no monitor.
  CommunicatorKind kind = CommunicatorKind::kAuto;
  NcclOptions nccl{};  ///< For `kNccl`. The timeout is that of the group.
};

/// A communicator over `group`, watched where the group has a store that a thread of ours may use. It uses the group
/// until `isolate` is called.
/// @param progress  where the replica writes what it is doing.
/// @param device    of the parameters.
[[nodiscard]] std::shared_ptr<Communicator> make_watched_communicator(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::shared_ptr<Progress>& progress, at::Device device,
    const WatchOptions& options);

}  // namespace lockstep
