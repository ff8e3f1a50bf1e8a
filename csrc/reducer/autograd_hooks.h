// Where the engine listens to autograd: at each parameter, and at the outputs of forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "compat.h"
#include "core/ids.h"

namespace lockstep {

/// Who listens. Calls come from autograd's threads, without the GIL.
class GradListener {
 public:
  virtual ~GradListener() = default;
  /// The gradient of parameter `id` has been written in full for this visit of the backward pass.
  virtual void on_grad_ready(ParamId id) = 0;
  /// A backward pass has reached an output of forward, before any parameter behind it.
  virtual void on_output_reached() = 0;
};

/// Hooks on the AccumulateGrad node of each parameter, removed on destruction. Keeps the nodes alive, as autograd
/// itself holds them weakly.
class AutogradHooks {
 public:
  /// @param listener  must outlive this object.
  AutogradHooks(std::span<const at::Tensor> params, GradListener& listener);
  ~AutogradHooks();
  AutogradHooks(const AutogradHooks&) = delete;
  AutogradHooks& operator=(const AutogradHooks&) = delete;

  /// Removes the hooks. Safe to call twice.
  void remove();

  /// The nodes listened to, by ParamId; empty after `remove`.
  [[nodiscard]] const std::vector<compat::NodePtr>& nodes() const { return nodes_; }

 private:
  std::vector<compat::NodePtr> nodes_;
  std::vector<uintptr_t> keys_;
};

/// Has `listener` told when a backward pass reaches one of `outputs`. The hook belongs to the graph and may outlive
/// the listener, which it holds weakly. Outputs without a graph are passed over.
void watch_outputs(std::span<const at::Tensor> outputs, const std::weak_ptr<GradListener>& listener);

/// What the backward pass that is running was started for.
enum class BackwardKind {
  kAccumulate,        ///< `backward()`: every gradient it meets.
  kGradOfParameters,  ///< `autograd.grad` with respect to one of the parameters: their `.grad` stays as it is.
  kOther,             ///< `autograd.grad` with respect to something else, or `backward(inputs=...)`.
};
[[nodiscard]] BackwardKind current_backward_kind(const AutogradHooks& hooks);

/// Autograd still writes the gradient of `param` through `node`: casting or moving a parameter gives it another node.
[[nodiscard]] bool accumulates_through(const at::Tensor& param, const compat::NodePtr& node);

/// The user has hung a hook on this parameter that runs before ours.
[[nodiscard]] bool has_user_hook(const at::Tensor& param);

/// Runs `callback` at the end of the backward pass that this thread is in, on the thread that started it.
void at_end_of_backward(std::function<void()> callback);

/// The gradient being reported belongs to a distributed autograd pass (RPC), which keeps it in a context of its own and
/// not in `.grad`. Known only while a parameter's hook runs.
[[nodiscard]] bool in_distributed_autograd();

/// A number that tells one running backward pass from another, -1 outside of any. A pass started inside another one
/// (reentrant checkpointing) has a number of its own.
[[nodiscard]] int current_backward();

}  // namespace lockstep
