// The comm hook between steps: replaced, saved, loaded.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <utility>

#include "core/error.h"
#include "core/fingerprint.h"
#include "reducer/reducer.h"

namespace lockstep {
namespace {

/// Sums of three or more depend on where things lie, and seeds on the number of buckets: a run that goes on bit for bit
/// needs the buckets it had.
constexpr const char* kPlanKey = "plan/buckets";

uint64_t fingerprint_of(const std::vector<std::string>& names) {
  return fingerprint(fmt::format("{}", fmt::join(names, "\n")));
}

/// The names' fingerprint; then, for each bucket, number and limit of its parameters and who they are.
at::Tensor saved_plan(const BucketPlan& plan, const std::vector<std::string>& names) {
  std::vector<int64_t> numbers{static_cast<int64_t>(fingerprint_of(names))};
  for (const Bucket& bucket : plan.buckets()) {
    numbers.push_back(static_cast<int64_t>(bucket.params.size()));
    numbers.push_back(bucket.limit_bytes);
    for (const ParamId id : bucket.params) numbers.push_back(static_cast<int64_t>(index(id)));
  }
  return at::tensor(numbers, at::kLong);
}

/// Empty for parameters with other names.
std::vector<BucketGroup> groups_in(const at::Tensor& saved, const std::vector<std::string>& names) {
  const at::Tensor dense = saved.to(at::kCPU, at::kLong).contiguous();
  const std::span<const int64_t> numbers(dense.const_data_ptr<int64_t>(), static_cast<size_t>(dense.numel()));
  if (numbers.empty() || numbers[0] != static_cast<int64_t>(fingerprint_of(names))) return {};
  std::vector<BucketGroup> groups;
  for (size_t at = 1; at + 2 <= numbers.size();) {
    const auto count = static_cast<size_t>(numbers[at]);
    BucketGroup group{.params = {}, .limit_bytes = numbers[at + 1]};
    at += 2;
    if (count > numbers.size() - at) return {};
    for (const int64_t id : numbers.subspan(at, count)) {
      if (id < 0 || static_cast<size_t>(id) >= names.size()) return {};
      group.params.push_back(param_id(static_cast<size_t>(id)));
    }
    at += count;
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace

void Reducer::set_hook(std::unique_ptr<CommHook> hook) {
  const std::lock_guard lock(mutex_);
  check_between_steps("the comm hook cannot be replaced");
  hook_ = std::move(hook);
  realign();
}

void Reducer::check_between_steps(const char* what) const {
  if (!in_pass()) return;
  raise(Code::kHookDuringPass, fmt::format("{} while a backward pass is being reduced. Do it between steps.", what));
}

HookState Reducer::hook_state() {
  const std::lock_guard lock(mutex_);
  check_between_steps("the comm hook's state cannot be saved");
  HookState state = hook_->state();
  if (plan_state_ == PlanState::kFinal) state.emplace(kPlanKey, saved_plan(buffers_.plan(), params_.names));
  return state;
}

void Reducer::load_hook_state(const HookState& state) {
  const std::lock_guard lock(mutex_);
  check_between_steps("the comm hook's state cannot be loaded");
  std::vector<HookSubject> subjects;
  for (size_t i = 0; i < params_.size(); ++i) subjects.push_back({params_.names[i], specs_[i].numel});
  HookState of_hook = state;
  const auto plan = of_hook.extract(kPlanKey);
  const std::vector<std::string> complaints = hook_->load_state(of_hook, subjects, comm_->rank());
  if (!plan.empty() && options_.graph != GraphKind::kDynamic) {
    std::vector<BucketGroup> groups = groups_in(plan.mapped(), params_.names);
    if (!groups.empty()) {
      adopt_plan(BucketPlan(specs_, std::move(groups), hook_->slot_alignment()));
      plan_state_ = PlanState::kFinal;
    }
  }
  for (const std::string& complaint : complaints) warn(Code::kHookState, complaint);
}

HookStats Reducer::hook_stats() {
  const std::lock_guard lock(mutex_);
  return hook_->stats();
}

std::string Reducer::hook_signature() {
  const std::lock_guard lock(mutex_);
  return hook_->signature();
}

}  // namespace lockstep
