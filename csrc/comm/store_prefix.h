// Places in a process group's store that no other replica takes.
#pragma once

#include <string>

namespace lockstep {

/// "KIND/0", "KIND/1" and so on, for one replica of a group after the other. Every rank asks alike, so that all count
/// alike; by rank too, because ranks may be threads of one process. Thread-safe.
[[nodiscard]] std::string next_store_prefix(const std::string& kind, const std::string& group_name, int rank);

}  // namespace lockstep
