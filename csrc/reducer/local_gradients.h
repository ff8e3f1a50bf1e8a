// Why gradients stayed local: a search of the autograd graph, done only when a backward left some out.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "buckets/grad_buffers.h"
#include "compat.h"
#include "reducer/autograd_hooks.h"

namespace lockstep {

/// Knows the outputs of the forwards whose backward is expected, without keeping them alive.
class OutputWatch {
 public:
  void add(std::span<const at::Tensor> outputs);
  void clear() { nodes_.clear(); }
  [[nodiscard]] bool empty() const { return nodes_.empty(); }

  /// For each of `params`: a backward from an output that still exists can reach it. Visits the whole graph behind the
  /// outputs once. Parameters used inside reentrant checkpoints are hidden from it.
  [[nodiscard]] std::vector<bool> reach(const std::vector<ParamId>& params, const AutogradHooks& hooks) const;

 private:
  std::vector<compat::WeakNodePtr> nodes_;
};

/// Groups of parameters with the likely reason why each got no gradient, as text for a message.
/// @param reachable  what `OutputWatch::reach` says of `missing`.
[[nodiscard]] std::string reasons_for(const std::vector<ParamId>& missing, const std::vector<bool>& reachable,
                                      const ParamList& params, const AutogradHooks& hooks);

}  // namespace lockstep
