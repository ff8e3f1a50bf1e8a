// One NCCL communicator: joined, freed and aborted within time limits.
#pragma once

#include <nccl.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/nccl_communicator.h"

namespace lockstep {

/// What went wrong, in NCCL's words: the kind of error and the last message that NCCL kept in this process.
[[nodiscard]] std::string nccl_reason(ncclResult_t result);

/// How long freeing or aborting may take before the communicator is left to a thread of its own.
inline constexpr std::chrono::seconds kNcclFarewell{10};

/// Joining happens on a communicator that does not block, because only that can be given up. But each call on such a
/// communicator starts a thread inside NCCL, so the collectives run on a blocking one that is split off it.
class NcclHandle {
 public:
  /// Collective. The communicator is bound to the current device.
  /// @throws lockstep::Error  the other ranks did not join within the timeout or with other options, or NCCL failed.
  NcclHandle(c10d::Store& store, int rank, int size, const NcclOptions& options);

  [[nodiscard]] ncclComm_t get() const { return comm_.get(); }
  /// All ranks are on one host, as NCCL tells hosts apart, and NCCL_P2P_DISABLE is set on none.
  [[nodiscard]] bool is_on_one_host() const { return one_host_; }
  /// An error that NCCL noticed by itself, such as a peer that is gone; ncclInProgress while a call goes on in the
  /// background, which only happens when NCCL_COMM_BLOCKING=0 forbids blocking. One thread at a time may ask.
  [[nodiscard]] ncclResult_t async_error() const;

  enum class Farewell {
    kWait,   ///< Up to kNcclFarewell.
    kLeave,  ///< NCCL frees it when the CUDA graphs that it was captured into are gone, which nobody waits for.
  };
  /// Frees the communicator, on which nothing is on its way. Not to be used afterwards.
  void close(Farewell farewell);
  /// Ends what is on its way, wherever it stands, and frees the communicator. Not to be used afterwards. A caller that
  /// is inside NCCL at this moment comes back with an error.
  void abort();

 private:
  struct Abort {
    void operator()(ncclComm_t comm) const;
  };
  using Owned = std::unique_ptr<ncclComm, Abort>;

  Owned joined_;  // empty once it has served, unless its resources are shared
  Owned comm_;
  bool one_host_ = true;
};

}  // namespace lockstep
