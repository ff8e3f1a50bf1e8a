// A communicator of our own on NCCL, without a c10d group in between.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"

namespace lockstep {

/// Equal on all ranks.
struct NcclOptions {
  /// For all ranks to join, and for each collective from the moment that it is the oldest on its way.
  std::chrono::milliseconds timeout{600'000};
  /// Most thread blocks per collective, which compute then lacks; 0: NCCL decides.
  int max_ctas = 0;
  /// Network plugin or transport, such as "Socket" or "IB"; empty: NCCL decides.
  std::string net_name{};
  /// Keep the communicator that joining took, and share its connections: one communicator more, but less memory each.
  bool split_share = false;
  /// Gradients of so many bytes and more are averaged where they lie. Empty: 256 KiB where all ranks are on one host
  /// and NCCL_P2P_DISABLE is not 1, else 16 MiB, because each tensor then pays for the way through the network.
  std::optional<int64_t> in_place_bytes{};
};

/// The NCCL version this library was built with, as "2.28.9"; empty without NCCL.
[[nodiscard]] std::string nccl_version();

/// Creates a communicator over all ranks of `store`, on the calling thread's current CUDA device. Collective.
///
/// Collectives run on a stream of their own with high priority: it waits for the current stream at the call, and
/// `Transfer::wait` makes the then current stream wait for it. The host waits for no device, except that the first
/// collective of a kind connects to the other ranks, and at the end of sparse sums. Tensors must be on this
/// communicator's device and, but for sums, dense; sums and maxima take float, double, half, bfloat16, int, long,
/// uint8, int8, bool and, for sums, complex; the rest takes all.
///
/// A watchdog thread notices errors and collectives that take longer than the timeout. It then aborts the communicator:
/// what was on its way ends with undefined values, and every later call and wait throws its report. Destruction, in any
/// order with transfers, store and process group, waits at most 10 seconds for what is on its way and then aborts.
///
/// @param store  used only inside this call. Its keys are taken as they are: give every communicator a prefix.
/// @throws lockstep::Error  in a build without NCCL, without a GPU, or if a rank did not join in time (which one is
/// said).
[[nodiscard]] std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                                                   int rank, int size, const NcclOptions& options = {});

}  // namespace lockstep
