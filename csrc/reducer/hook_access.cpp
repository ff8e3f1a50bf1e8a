// The comm hook between steps: replaced, saved, loaded.
#include <utility>

#include "core/error.h"
#include "reducer/reducer.h"

namespace lockstep {

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
  return hook_->state();
}

void Reducer::load_hook_state(const HookState& state) {
  const std::lock_guard lock(mutex_);
  check_between_steps("the comm hook's state cannot be loaded");
  std::vector<HookSubject> subjects;
  for (size_t i = 0; i < params_.size(); ++i) subjects.push_back({params_.names[i], specs_[i].numel});
  for (const std::string& complaint : hook_->load_state(state, subjects, comm_->rank())) {
    warn(Code::kHookState, complaint);
  }
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
