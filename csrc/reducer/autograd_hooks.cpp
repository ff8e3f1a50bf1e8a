#include "reducer/autograd_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/autograd/context/context.h>

namespace lockstep {
namespace {

namespace ag = torch::autograd;

class ParamHook final : public ag::FunctionPostHook {
 public:
  ParamHook(GradListener& listener, ParamId id) : listener_(&listener), id_(id) {}

  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list& /*inputs*/) override {
    listener_->on_grad_ready(id_);
    return outputs;  // AccumulateGrad has none: an empty list
  }

 private:
  GradListener* listener_;
  ParamId id_;
};

class OutputHook final : public ag::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<GradListener> listener) : listener_(std::move(listener)) {}

  ag::variable_list operator()(const ag::variable_list& grads) override {
    if (const auto listener = listener_.lock()) listener->on_output_reached();
    return grads;
  }

 private:
  std::weak_ptr<GradListener> listener_;
};

}  // namespace

AutogradHooks::AutogradHooks(std::span<const at::Tensor> params, GradListener& listener) {
  nodes_.reserve(params.size());
  keys_.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    compat::NodePtr node = ag::impl::grad_accumulator(params[i]);
    keys_.push_back(node->add_post_hook(std::make_unique<ParamHook>(listener, param_id(i))));
    nodes_.push_back(std::move(node));
  }
}

AutogradHooks::~AutogradHooks() { remove(); }

void AutogradHooks::remove() {
  for (size_t i = 0; i < nodes_.size(); ++i) nodes_[i]->del_post_hook(keys_[i]);
  nodes_.clear();
  keys_.clear();
}

void watch_outputs(std::span<const at::Tensor> outputs, const std::weak_ptr<GradListener>& listener) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (const auto& node = output.grad_fn()) node->add_tensor_pre_hook(std::make_unique<OutputHook>(listener));
  }
}

BackwardKind current_backward_kind(const AutogradHooks& hooks) {
  const auto* wanted = ag::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return BackwardKind::kAccumulate;
  for (const compat::NodePtr& node : hooks.nodes()) {
    const auto entry = wanted->find(node.get());
    if (entry != wanted->end() && entry->second.captures_) return BackwardKind::kGradOfParameters;
  }
  return BackwardKind::kOther;
}

bool accumulates_through(const at::Tensor& param, const compat::NodePtr& node) {
  return ag::impl::try_get_grad_accumulator(param).get() == node.get();
}

bool has_user_hook(const at::Tensor& param) { return ag::impl::post_acc_grad_hooks(param) != nullptr; }

void at_end_of_backward(std::function<void()> callback) {
  ag::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool in_distributed_autograd() {
  return torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr() != nullptr;
}

int current_backward() { return ag::get_current_graph_task_id(); }

}  // namespace lockstep
