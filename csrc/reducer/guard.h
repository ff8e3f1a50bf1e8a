// What the ranks must agree on before the buckets of a pass may be trusted.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "comm/host_copy.h"

namespace lockstep {

/// What one rank is about to reduce, in numbers that must be equal on all ranks.
struct PassWord {
  /// Joined ranks (`shadow_step`) know no number of forwards: they agree with any.
  static constexpr int64_t kAny = -1;

  int64_t forwards = 0;  ///< Begun since the last reduced pass; kAny: not compared.
  int64_t pass = 0;      ///< Reduced passes before this one.
  int64_t mode = 0;      ///< Kind of graph and the like: which collectives will follow.
  uint64_t plan = 0;     ///< Fingerprint of the bucket plan.
  uint64_t hook = 0;     ///< Fingerprint of the comm hook and its arguments.
  int64_t threw = 0;     ///< 1: what this rank owed to this pass or the last one went out as NaN.
  double weight = 1.0;   ///< Not compared: what its gradients count; not negative.
};

/// Agrees on a PassWord by one all-reduce of 13 numbers and one for each rank, which leaves before the first bucket and
/// is awaited before the first mean: it comes through even when the buckets behind it do not fit together. Every rank
/// learns of a difference, also one between two other ranks, because the maximum and the minimum over ranks travel,
/// each with its rank. On a device the numbers of a pass are looked at in the next one, so that the host never waits
/// for the device.
class Guard {
 public:
  /// Collective. Nothing happens when it was started already in this pass.
  void start(Communicator& comm, const PassWord& word, at::Device device);
  [[nodiscard]] bool started() const { return transfer_ != nullptr; }

  /// What the ranks found out about each other.
  struct Finding {
    std::string text;               ///< What differs, equal on all ranks; empty: nothing.
    bool sizes_may_differ = false;  ///< The buckets of this pass do not fit together.
    bool is_late = false;           ///< About the pass before this one, whose means have been published.
  };
  /// What the others say, `kNow` of this pass, or `kLater` of the one before; what is still to be read goes first.
  Finding finish(Communicator& comm, Reading reading);

  /// The weights of all ranks in the pass that was finished last: float64, on the device of the exchange.
  [[nodiscard]] const at::Tensor& weights() const { return weights_; }

  /// Forgets passes that were not finished or not read.
  void reset();

 private:
  at::Tensor exchange_;
  at::Tensor weights_;
  TransferPtr transfer_;
  std::optional<HostCopy> unread_;
};

}  // namespace lockstep
