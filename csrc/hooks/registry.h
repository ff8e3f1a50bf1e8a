// The hooks that come with the engine, by name. A new hook is one file and one row in registry.cpp.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "hooks/comm_hook.h"

namespace lockstep {

/// One row: the name users give, and how the hook is made.
struct HookEntry {
  std::string_view name;
  std::unique_ptr<CommHook> (*make)();
};

/// All rows, in the order of registry.cpp.
[[nodiscard]] const std::vector<HookEntry>& comm_hooks();

/// Makes the hook called `name`.
/// @throws lockstep::Error  there is none; the text lists the known names.
[[nodiscard]] std::unique_ptr<CommHook> make_comm_hook(std::string_view name);

// Factories of the rows.
std::unique_ptr<CommHook> make_allreduce();

}  // namespace lockstep
