// The one exception type of the engine, and the way to raise it with a formatted sentence.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep {

/// What every failure of the engine derives from. Python sees it as `RuntimeError`.
/// The text says what happened (rank, numbers, names), why it matters and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Raises `Error` with a text formatted by fmt.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace lockstep
