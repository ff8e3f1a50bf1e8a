// When the backward passes of a module began, had all gradients, and had their means.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "comm/moment.h"
#include "reducer/autograd_hooks.h"

namespace lockstep {

/// Marks the turns of backward passes through outputs that it was shown, whatever reduces their gradients. Marking
/// needs no GIL: a hook in Python would make autograd's thread take it in the middle of a pass, which costs
/// 0.08 ms a step beside an H200. Thread-safe; owned by a shared_ptr.
class BackwardMoments final : public GradListener, public std::enable_shared_from_this<BackwardMoments> {
 public:
  struct Pass {
    Moment begin;      ///< The first gradient.
    Moment gradients;  ///< All gradients of this rank are there, and packed.
    Moment means;      ///< What was queued for the end of the pass is done: the means of all ranks are there.
  };

  /// @param now  what marks a moment on the current stream.
  explicit BackwardMoments(std::function<Moment()> now) : now_(std::move(now)) {}

  /// A pass through one of `outputs` counts; those without a graph are passed over.
  void watch(std::span<const at::Tensor> outputs) { watch_outputs(outputs, weak_from_this()); }
  /// The passes that have ended since the last call. One that threw never ends.
  [[nodiscard]] std::vector<Pass> take();

  void on_grad_ready(ParamId /*id*/) override {}
  void on_output_reached() override;

 private:
  void on_gradients(int backward);
  void on_means(int backward);

  std::function<Moment()> now_;
  std::mutex mutex_;
  std::optional<Pass> running_;
  int backward_ = -1;  // which pass of autograd's that is
  std::vector<Pass> ended_;
};

}  // namespace lockstep
