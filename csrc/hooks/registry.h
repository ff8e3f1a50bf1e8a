// The hooks that come with the engine, by name. A new hook is one file and one row in registry.cpp.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "hooks/comm_hook.h"
#include "hooks/hook_args.h"

namespace lockstep {

/// How near a hook's answer is to the mean over ranks, in a world of more than one. The contract test holds each row
/// to it.
enum class Fidelity {
  kExact,      ///< Up to the rounding of the gradients' own dtype.
  kHalf,       ///< Up to the rounding of fp16 or bf16.
  kQuantized,  ///< Up to 2 steps of an 8-bit grid over each block of 256 elements.
  kLowRank,    ///< A projection: near only where gradients are of low rank, or summed over steps.
};

/// One row: the name users give, what the hook takes, and how it is made.
struct HookEntry {
  std::string_view name;
  Fidelity fidelity;
  std::span<const HookParam> params;
  std::unique_ptr<CommHook> (*make)(const HookArgs& completed);
};

/// All rows, in the order of registry.cpp.
[[nodiscard]] const std::vector<HookEntry>& comm_hooks();

/// Makes the hook called `name`.
/// @throws lockstep::Error  there is none (the text lists the known names), or `args` has a name, type or value that
///                          the hook does not take (the text says which it takes).
[[nodiscard]] std::unique_ptr<CommHook> make_comm_hook(std::string_view name, const HookArgs& args = {});

// What the rows are made of.
std::span<const HookParam> allreduce_params();
std::unique_ptr<CommHook> make_allreduce(const HookArgs& args);
std::span<const HookParam> cast_params();
std::unique_ptr<CommHook> make_fp16(const HookArgs& args);
std::unique_ptr<CommHook> make_bf16(const HookArgs& args);
std::span<const HookParam> int8_params();
std::unique_ptr<CommHook> make_int8(const HookArgs& args);
std::span<const HookParam> power_sgd_params();
std::unique_ptr<CommHook> make_power_sgd(const HookArgs& args);
std::unique_ptr<CommHook> make_batched_power_sgd(const HookArgs& args);

}  // namespace lockstep
