// Which parameters were used: here, anywhere, and probably in the next step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "buckets/grad_buffers.h"
#include "comm/communicator.h"
#include "comm/host_copy.h"
#include "core/ids.h"

namespace lockstep {

/// Finds unused parameters without searching the graph: by what fired, and by what fired in the last step.
///
/// A parameter without a gradient in the last synchronised step is presumed unused, so that its bucket need not wait
/// for the end of backward. When it fires after all, and after its bucket has left, it is *late*: one more small
/// reduction mends its mean, and it is not presumed unused again. Counts of users and of late comers are summed over
/// ranks in one int32 per parameter.
class UsageTracker {
 public:
  explicit UsageTracker(size_t num_params);

  /// A gradient arrived. Counts until `end_step`, so over all micro-batches that are reduced together.
  void mark_used(ParamId id) { used_[index(id)] = 1; }
  void mark_late(ParamId id) { late_[index(id)] = 1; }

  [[nodiscard]] bool used_here(ParamId id) const { return used_[index(id)] != 0; }
  [[nodiscard]] bool late_here(ParamId id) const { return late_[index(id)] != 0; }

  /// How many reports to wait for: 0 for a parameter presumed unused, else 1.
  void expect(const ParamList& params, std::vector<uint32_t>& firings) const;

  /// The user says that these will not be used in the next step. Not with counts that are read later: the other ranks
  /// would not know that something may be late.
  void hint_unused(ParamId id) {
    presumed_unused_[index(id)] = 1;
    hinted_[index(id)] = 1;
  }
  [[nodiscard]] bool hinted(ParamId id) const { return hinted_[index(id)] != 0; }

  /// Starts the exchange with the other ranks. Collective, after the last bucket has left.
  void start_exchange(Communicator& comm, at::Device device);
  [[nodiscard]] bool exchange_started() const { return counts_.defined(); }
  [[nodiscard]] bool exchange_pending() const { return transfer_ != nullptr; }
  /// Waits for it. Afterwards the next two answer for all ranks. With `kLater` the counts are only looked at when the
  /// answer depends on them: a parameter was not used here, or may be late somewhere, as all ranks know alike from the
  /// step before. Else nothing is late, and what this rank has used is used.
  void finish_exchange(Communicator& comm, Reading reading);
  [[nodiscard]] bool used_anywhere(ParamId id) const { return users_[index(id)] != 0; }
  [[nodiscard]] bool late_anywhere(ParamId id) const { return late_comers_[index(id)] != 0; }
  [[nodiscard]] bool anyone_late() const { return anyone_late_; }
  /// There is a parameter that no rank used.
  [[nodiscard]] bool any_unused() const { return any_unused_; }
  /// An exchange has taken place, in this step or in an earlier one.
  [[nodiscard]] bool knows_other_ranks() const { return knows_other_ranks_; }

  /// Number of ranks that used each parameter (int32), as last looked at; before that, zeros.
  [[nodiscard]] at::Tensor map(at::Device device) const;

  /// This rank has used the same parameters in every step that was reduced (`note_reduced`), or in less than two.
  [[nodiscard]] bool same_in_all_steps() const { return same_in_all_steps_; }
  /// A backward of this rank has been reduced: compares with the one before. To be called before `end_step`.
  void note_reduced();

  /// Learns from this step and forgets it.
  void end_step();

 private:
  void settle(Communicator& comm);
  void learn(const at::Tensor& counts, int ranks);

  std::vector<uint8_t> used_;
  std::vector<uint8_t> late_;
  std::vector<uint8_t> presumed_unused_;
  std::vector<uint8_t> hinted_;
  std::vector<uint8_t> surprising_;  // was late once: never presumed unused again
  std::vector<int32_t> users_;       // ranks, by ParamId, as last exchanged
  std::vector<int32_t> late_comers_;
  bool anyone_late_ = false;
  bool any_unused_ = false;
  bool knows_other_ranks_ = false;
  bool may_be_late_ = false;  // somebody left a parameter out in the last step, and may presume it unused in this one
  bool same_in_all_steps_ = true;
  std::vector<uint8_t> last_used_;  // in the last reduced step; empty: there was none
  at::Tensor counts_;
  TransferPtr transfer_;
  std::optional<HostCopy> unread_;  // counts of the last step
};

}  // namespace lockstep
