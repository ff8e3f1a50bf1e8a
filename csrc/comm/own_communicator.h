// Connections that only this replica uses, between the ranks of a process group.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"
#include "comm/nccl_communicator.h"

namespace lockstep {

/// What carries the collectives of a replica.
enum class CommunicatorKind {
  kAuto,   ///< Connections of its own for gloo; the group for everything else.
  kGroup,  ///< The process group, which others may use too.
  kNccl,   ///< An NCCL communicator of its own, called without c10d in between. CUDA only.
};

/// "auto", "group" or "nccl".
/// @throws std::invalid_argument  another word; lists these.
[[nodiscard]] CommunicatorKind communicator_kind(const std::string& name);

/// Connections of our own: a collective that meets another one of the same group, because ranks issued them in
/// different orders, ends the process under gloo if sizes differ, and mixes sums if not. They take the group's timeout
/// and options.
///
/// Null where the group is to be used, or cannot be doubled (written in Python, wrapped for debugging, without a
/// store). Collective, and every rank must ask alike.
/// @param device  where the parameters are.
/// @param nccl    for `kNccl`; its timeout does not count.
/// @throws lockstep::Error or c10::Error  a rank did not join within the group's timeout.
[[nodiscard]] std::shared_ptr<Communicator> make_own_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                                  CommunicatorKind kind, at::Device device,
                                                                  NcclOptions nccl = {});

}  // namespace lockstep
