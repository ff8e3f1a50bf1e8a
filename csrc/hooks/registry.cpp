#include "hooks/registry.h"

#include <fmt/ranges.h>

#include "core/error.h"

namespace lockstep {

const std::vector<HookEntry>& comm_hooks() {
  static const std::vector<HookEntry> rows{
      {"allreduce", Fidelity::kExact, allreduce_params(), &make_allreduce},
      {"fp16", Fidelity::kHalf, cast_params(), &make_fp16},
      {"bf16", Fidelity::kHalf, cast_params(), &make_bf16},
      {"int8", Fidelity::kQuantized, int8_params(), &make_int8},
      {"power_sgd", Fidelity::kLowRank, power_sgd_params(), &make_power_sgd},
      {"batched_power_sgd", Fidelity::kLowRank, power_sgd_params(), &make_batched_power_sgd},
  };
  return rows;
}

std::unique_ptr<CommHook> make_comm_hook(std::string_view name, const HookArgs& args) {
  std::vector<std::string_view> known;
  for (const HookEntry& row : comm_hooks()) {
    if (row.name == name) return row.make(args.completed(name, row.params));
    known.push_back(row.name);
  }
  fail(Code::kUnknownHook, "there is no comm hook called '{}'. Known hooks: {}.", name, fmt::join(known, ", "));
}

}  // namespace lockstep
