#include "hooks/comm_hook.h"

#include "core/error.h"

namespace lockstep {

std::vector<std::string> CommHook::load_state(const HookState& state, std::span<const HookSubject> /*subjects*/,
                                              int /*rank*/) {
  if (!state.empty()) {
    fail(Code::kHookState,
         "the comm hook '{}' keeps nothing between steps, but was given a state with {} entries. Register the hook "
         "that the state was saved from first.",
         name(), state.size());
  }
  return {};
}

}  // namespace lockstep
