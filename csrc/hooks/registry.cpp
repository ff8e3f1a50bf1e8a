#include "hooks/registry.h"

#include <fmt/ranges.h>

#include "core/error.h"

namespace lockstep {

const std::vector<HookEntry>& comm_hooks() {
  static const std::vector<HookEntry> rows{
      {"allreduce", &make_allreduce},
  };
  return rows;
}

std::unique_ptr<CommHook> make_comm_hook(std::string_view name) {
  std::vector<std::string_view> known;
  for (const HookEntry& row : comm_hooks()) {
    if (row.name == name) return row.make();
    known.push_back(row.name);
  }
  fail(Code::kUnknownHook, "there is no comm hook called '{}'. Known hooks: {}.", name, fmt::join(known, ", "));
}

}  // namespace lockstep
