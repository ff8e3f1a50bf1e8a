// Every difference between the supported torch versions (2.11 and newer), in one place.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace lockstep::compat {

/// Owner of an autograd node: std::shared_ptr up to 2.12, c10::intrusive_ptr from 2.13.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename Owner>
struct WeakOf;
template <typename T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <typename T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
/// Knows a node without keeping it; `lock()` gives a NodePtr, null when the node is gone.
using WeakNodePtr = WeakOf<NodePtr>::type;

// 2.13 renamed the flat-tensor collectives and marks the old names, which still work everywhere, as deprecated.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

inline c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  std::vector<int64_t> equal_splits;
  return group.alltoall_base(output, input, equal_splits, equal_splits);
}

inline c10::intrusive_ptr<c10d::Work> reduce_scatter(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group._reduce_scatter_base(output, input);
}

#pragma GCC diagnostic pop

}  // namespace lockstep::compat
