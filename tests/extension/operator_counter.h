// Counts the operators that go through torch's dispatcher.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>

namespace lockstep::testing {

/// Counts operators (aten, c10d, ...) of all threads between `start` and `stop`, also those called by other operators.
///
/// The mechanism of torch's profiler without its memory per event. One counter at a time: the total is static,
/// because torch calls a plain function.
class OperatorCounter {
 public:
  void start() {
    total_ = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&count_one).scopes({at::RecordScope::FUNCTION}));
  }
  void stop() { at::removeCallback(handle_); }

  /// Since the last `start`.
  [[nodiscard]] int64_t count() const { return total_; }

 private:
  static std::unique_ptr<at::ObserverContext> count_one(const at::RecordFunction& function) {
    if (function.operator_name()) ++total_;  // spans that code marks by hand have none
    return nullptr;
  }

  static inline std::atomic<int64_t> total_ = 0;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace lockstep::testing
