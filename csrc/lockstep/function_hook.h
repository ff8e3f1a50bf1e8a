// Comm hooks from a lambda.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "comm/communicator.h"
#include "hooks/comm_hook.h"

namespace lockstep {

namespace detail {

template <typename Finish>
class FunctionMean final : public PendingMean {
 public:
  explicit FunctionMean(Finish finish) : finish_(std::move(finish)) {}
  at::Tensor wait() override { return finish_(); }

 private:
  Finish finish_;
};

template <typename Start>
class FunctionHook final : public CommHook {
 public:
  FunctionHook(std::string name, Start start) : name_(std::move(name)), start_(std::move(start)) {}
  [[nodiscard]] std::string name() const override { return name_; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    auto answer = start_(bucket, comm);
    if constexpr (std::is_convertible_v<decltype(answer), std::unique_ptr<PendingMean>>) {
      return answer;
    } else {
      static_assert(std::is_invocable_r_v<at::Tensor, decltype(answer)>,
                    "a comm hook returns a unique_ptr<PendingMean>, or a function that waits and returns the mean");
      return std::make_unique<FunctionMean<decltype(answer)>>(std::move(answer));
    }
  }

 private:
  std::string name_;
  Start start_;
};

}  // namespace detail

/// A comm hook of a function that starts the reduction of one bucket and returns a function that waits for it. The
/// gradients in `bucket.memory` are not divided by the number of ranks; `Communicator::average` does that.
///
///     make_hook("plain", [](const lockstep::GradBucket& bucket, lockstep::Communicator& comm) {
///       std::shared_ptr<lockstep::Transfer> transfer = comm.average(bucket.memory);
///       return [transfer, mean = bucket.memory] { transfer->wait(); return mean; };
///     });
///
/// @param name  the same on all ranks, which compare it: choose another name for another way to reduce.
template <typename Start>
requires std::invocable<Start&, const GradBucket&, Communicator&>
[[nodiscard]] std::unique_ptr<CommHook> make_hook(std::string name, Start start) {
  return std::make_unique<detail::FunctionHook<Start>>(std::move(name), std::move(start));
}

}  // namespace lockstep
