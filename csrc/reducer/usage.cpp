#include "reducer/usage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

/// Late comers are counted in the upper half of each int32, users in the lower half.
constexpr int32_t kLateUnit = 1 << 16;

}  // namespace

UsageTracker::UsageTracker(size_t num_params)
    : used_(num_params),
      late_(num_params),
      presumed_unused_(num_params),
      hinted_(num_params),
      surprising_(num_params),
      users_(num_params),
      late_comers_(num_params) {}

void UsageTracker::expect(const ParamList& params, std::vector<uint32_t>& firings) const {
  for (size_t i = 0; i < used_.size(); ++i) {
    // An existing gradient is sent as it is; what a late comer adds to it could not be told apart afterwards.
    const bool absent = presumed_unused_[i] != 0 && !params.sparse[i] && !params.tensors[i].grad().defined();
    firings[i] = absent ? 0 : 1;
  }
}

void UsageTracker::start_exchange(Communicator& comm, at::Device device) {
  const at::Tensor counts = staging(static_cast<int64_t>(used_.size()), at::kInt, device);
  auto* count = counts.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < used_.size(); ++i) count[i] = used_[i] + kLateUnit * late_[i];
  counts_ = sent_to(counts, device);
  transfer_ = comm.sum(counts_);
}

void UsageTracker::finish_exchange(Communicator& comm, Reading reading) {
  std::exchange(transfer_, nullptr)->wait();
  settle(comm);
  unread_.emplace(counts_);
  const bool all_used_here = std::all_of(used_.begin(), used_.end(), [](uint8_t used) { return used != 0; });
  if (reading == Reading::kNow || may_be_late_ || !all_used_here) return settle(comm);
  for (int32_t& users : users_) users = std::max(users, 1);  // this rank, at least
  anyone_late_ = false;
  any_unused_ = false;
}

/// Looks at the counts of the last exchange, if nobody has.
void UsageTracker::settle(Communicator& comm) {
  if (!unread_) return;
  learn(std::exchange(unread_, std::nullopt)->await(comm), comm.size());
}

void UsageTracker::learn(const at::Tensor& counts, int ranks) {
  const auto* count = counts.const_data_ptr<int32_t>();
  anyone_late_ = false;
  any_unused_ = false;
  may_be_late_ = false;
  knows_other_ranks_ = true;
  for (size_t i = 0; i < used_.size(); ++i) {
    users_[i] = count[i] % kLateUnit;
    late_comers_[i] = count[i] / kLateUnit;
    anyone_late_ = anyone_late_ || late_comers_[i] != 0;
    any_unused_ = any_unused_ || users_[i] == 0;
    may_be_late_ = may_be_late_ || users_[i] < ranks;
  }
}

at::Tensor UsageTracker::map(at::Device device) const { return at::tensor(users_, at::dtype(at::kInt)).to(device); }

void UsageTracker::note_reduced() {
  if (!last_used_.empty() && last_used_ != used_) same_in_all_steps_ = false;
  last_used_ = used_;
}

void UsageTracker::end_step() {
  for (size_t i = 0; i < used_.size(); ++i) {
    if (hinted_[i] == 0) surprising_[i] |= late_[i];  // a wrong hint says nothing about the model
    presumed_unused_[i] = (used_[i] == 0 && surprising_[i] == 0) ? 1 : 0;
  }
  std::fill(used_.begin(), used_.end(), uint8_t{0});
  std::fill(late_.begin(), late_.end(), uint8_t{0});
  std::fill(hinted_.begin(), hinted_.end(), uint8_t{0});
  counts_.reset();
  anyone_late_ = false;
}

}  // namespace lockstep
