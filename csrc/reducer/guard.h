// What the ranks must agree on before the buckets of a pass may be trusted.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>

#include "comm/communicator.h"

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
};

/// Agrees on a PassWord by one all-reduce of 11 numbers, which leaves before the first bucket and is awaited before the
/// first mean: it comes through even when the buckets behind it do not fit together. Every rank learns of a difference,
/// also one between two other ranks, because the maximum and the minimum over ranks travel, each with its rank.
class Guard {
 public:
  /// Collective. Nothing happens when it was started already in this pass.
  void start(Communicator& comm, const PassWord& word, at::Device device);
  [[nodiscard]] bool started() const { return transfer_ != nullptr; }

  /// What the ranks found out about each other.
  struct Finding {
    std::string text;               ///< What differs, equal on all ranks; empty: nothing.
    bool sizes_may_differ = false;  ///< The buckets of this pass do not fit together.
  };
  /// Waits for the others.
  Finding finish();

  /// Forgets a pass that was not finished.
  void reset();

 private:
  at::Tensor exchange_;
  TransferPtr transfer_;
};

}  // namespace lockstep
