#include "reducer/local_gradients.h"

#include <torch/csrc/autograd/function.h>

#include <unordered_set>

#include "reducer/messages.h"

namespace lockstep {
namespace {

using torch::autograd::Node;

/// Every node that a backward from `roots` could visit.
std::unordered_set<const Node*> behind(const std::vector<compat::NodePtr>& roots) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> next;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) next.push_back(node);
  };
  for (const compat::NodePtr& root : roots) visit(root.get());
  while (!next.empty()) {
    const Node* node = next.back();
    next.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace

void OutputWatch::add(std::span<const at::Tensor> outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn()) nodes_.emplace_back(output.grad_fn());
  }
}

std::vector<bool> OutputWatch::reach(const std::vector<ParamId>& params, const AutogradHooks& hooks) const {
  std::vector<compat::NodePtr> alive;
  for (const compat::WeakNodePtr& node : nodes_) {
    if (compat::NodePtr owner = node.lock()) alive.push_back(std::move(owner));
  }
  const auto reachable = behind(alive);
  std::vector<bool> result;
  for (const ParamId id : params) {
    result.push_back(index(id) < hooks.nodes().size() && reachable.contains(hooks.nodes()[index(id)].get()));
  }
  return result;
}

std::string reasons_for(const std::vector<ParamId>& missing, const std::vector<bool>& reachable,
                        const ParamList& params, const AutogradHooks& hooks) {
  enum Reason { kFrozen, kReplaced, kLeftOut, kUnreachable, kCount };
  static constexpr const char* kText[] = {
      "frozen after wrapping (requires_grad is False)",
      "cast or moved after wrapping, so that autograd no longer reports to the wrapper; wrap the module again",
      "reachable from the outputs of forward, but not part of the loss",
      "unreachable from the outputs of forward: not used there, or only for outputs that were dropped and are not part "
      "of the loss",
  };
  std::vector<ParamId> groups[kCount];
  for (size_t i = 0; i < missing.size(); ++i) {
    const at::Tensor& param = params.tensors[index(missing[i])];
    Reason reason = reachable[i] ? kLeftOut : kUnreachable;
    if (!param.requires_grad()) {
      reason = kFrozen;
    } else if (!hooks.nodes().empty() && !accumulates_through(param, hooks.nodes()[index(missing[i])])) {
      reason = kReplaced;
    }
    groups[reason].push_back(missing[i]);
  }
  std::string text;
  for (size_t reason = 0; reason < kCount; ++reason) {
    if (groups[reason].empty()) continue;
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", kText[reason], messages::names(params, groups[reason]));
  }
  return text;
}

}  // namespace lockstep
