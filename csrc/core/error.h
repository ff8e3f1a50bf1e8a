// The one exception type of the engine, its stable codes, and the way to raise it with a formatted sentence.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

/// What every failure of the engine derives from. Python sees it as `RuntimeError`.
/// The text says what happened (rank, numbers, names), why it matters and what to do, and ends with its code.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A collective has failed, most likely because another rank is gone: whoever watches the ranks may know which.
class CollectiveError : public Error {
 public:
  using Error::Error;
};

/// Stable numbers of errors and warnings: "[LS-007]" at the end of the text, explained in docs/errors.md. A number is
/// never given to another meaning. Those of the Python package begin at 101.
enum class Code : int {
  kNoParameters = 1,
  kDifferentModels = 2,
  kHookDuringPass = 3,
  kStaticGraphTooLate = 4,
  kNotFinalized = 5,
  kUnfinished = 6,
  kReadyTwice = 7,
  kManualTooLate = 8,
  kFinalizeRefused = 9,
  kDistributedAutograd = 10,
  kReductionFailed = 11,
  kUnknownHook = 12,
  kNoCudaKernels = 13,
  kHookResult = 14,
  kGradientChanged = 15,
  kGradientLayout = 16,
  kAborted = 17,
  kNoNccl = 18,
  kRanksDisagree = 19,
  kPeerFailed = 20,
  kPeerLost = 21,
  kStalled = 22,
  kLocalGradients = 23,
  kUnannounced = 24,
  kClearedByHook = 25,
  kReplicasDiffer = 26,
  kUnfrozen = 27,
  kGroupUnusable = 28,
  kMismatchedWaits = 29,
  kGradOfParameters = 30,
  kModeFlipped = 31,
  kSyncDuringPass = 32,
  kBadHint = 33,
  kNothingUnused = 34,
  kDeviceFailed = 35,
  kNcclNotJoined = 36,
  kNcclRefused = 37,
  kHookArgument = 38,
  kHookState = 39,
  kHigherOrder = 40,
  // Of programs in C++.
  kLaunch = 61,
  kWorldIncomplete = 62,
  kBackend = 63,
  kFrontArgument = 64,
  kModuleChanged = 65,
  kWrongDevice = 66,
  kWrapFailed = 67,
};

/// " [LS-007]".
[[nodiscard]] inline std::string tag(Code code) { return fmt::format(" [LS-{:03}]", static_cast<int>(code)); }

/// `text` with the code behind it, unless it carries one already (that of its cause).
[[nodiscard]] inline std::string coded(Code code, std::string text) {
  return text.find("[LS-") == std::string::npos ? std::move(text) + tag(code) : std::move(text);
}

/// `text` without the code at its end.
[[nodiscard]] inline std::string_view uncoded(std::string_view text) {
  const size_t at = text.rfind(" [LS-");
  return at != std::string_view::npos && text.ends_with(']') ? text.substr(0, at) : text;
}

/// Raises `Error` with a text formatted by fmt.
template <typename... Args>
[[noreturn]] void fail(Code code, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(coded(code, fmt::format(text, std::forward<Args>(args)...)));
}

}  // namespace lockstep
