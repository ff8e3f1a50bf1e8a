#include "comm/store_prefix.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <tuple>

namespace lockstep {

std::string next_store_prefix(const std::string& kind, const std::string& group_name, int rank) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, std::string, int>, int> taken;
  const std::lock_guard lock(mutex);
  return fmt::format("{}/{}", kind, taken[{kind, group_name, rank}]++);
}

}  // namespace lockstep
