#include "reducer/step_weight.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

/// A factor in half precision would have an error of its own.
bool takes_factor(const at::Tensor& grad) {
  return !grad.is_sparse() && (grad.scalar_type() == at::kFloat || grad.scalar_type() == at::kDouble);
}

}  // namespace

void StepWeight::set(std::optional<double> weight) { weight_ = weight; }

void StepWeight::begin_forward(const ParamList& params) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < aside_.size(); ++i) restore(params.tensors[i], param_id(i));
  aside_.clear();
  const auto has_grad = [](const at::Tensor& param) { return param.grad().defined(); };
  if (total_ > 0 && std::none_of(params.tensors.begin(), params.tensors.end(), has_grad)) total_ = 0;
  current_ = weight_.value_or(1.0);
  pending_ = true;
  if (current_ == 0) {
    for (const at::Tensor& param : params.tensors) aside_.push_back(std::exchange(param.mutable_grad(), at::Tensor()));
    if (total_ == 0) unit_ = 0;
    return;
  }
  const double factor = total_ == 0 ? 1.0 : unit_ / current_;
  unit_ = current_;
  if (factor == 1.0) return;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& param : params.tensors) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse()) {
      param.mutable_grad() = grad.mul(factor);
    } else {
      dense.push_back(grad);
    }
  }
  if (!dense.empty()) at::_foreach_mul_(dense, factor);
}

void StepWeight::restore(const at::Tensor& param, ParamId id) {
  if (index(id) < aside_.size()) param.mutable_grad() = std::exchange(aside_[index(id)], at::Tensor());
}

void StepWeight::end_pass() {
  total_ = 0;
  pending_ = false;
  aside_.clear();
}

void divide_by_weights(const ParamList& params, const std::vector<ParamId>& ids, const at::Tensor& weights,
                       double divided_by) {
  const at::NoGradGuard no_grad;
  const at::Tensor sum = weights.sum();
  const at::Tensor factor = at::where(sum > 0, divided_by / sum, at::zeros_like(sum));
  std::vector<at::Tensor> together;
  for (const ParamId id : ids) {
    at::Tensor& grad = params.tensors[index(id)].mutable_grad();
    if (!grad.defined()) continue;
    if (takes_factor(grad) && grad.device() == weights.device()) {
      together.push_back(grad);
    } else if (grad.is_sparse()) {
      grad = grad.mul(factor.to(grad.device(), /*non_blocking=*/true));
    } else {
      const at::ScalarType wide = grad.is_complex() ? at::kComplexDouble : at::kDouble;
      grad.copy_(grad.to(wide).mul_(factor.to(grad.device(), /*non_blocking=*/true)));
    }
  }
  if (together.empty()) return;
  if (weights.is_cpu()) {
    at::_foreach_mul_(together, factor.item<double>());
  } else {
    at::_foreach_mul_(together, factor);
  }
}

}  // namespace lockstep
