// A number that stands for a text when ranks compare notes.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// FNV-1a: equal texts give equal numbers on any machine and in any process, unlike std::hash.
[[nodiscard]] constexpr uint64_t fingerprint(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

}  // namespace lockstep
