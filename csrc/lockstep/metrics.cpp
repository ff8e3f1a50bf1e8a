#include "lockstep/metrics.h"

#include <ATen/ATen.h>

#include <cmath>

#include "comm/c10d_communicator.h"
#include "core/error.h"

namespace lockstep {
namespace {

void check_weight(double weight, int rank) {
  if (std::isfinite(weight) && weight >= 0) return;
  fail(Code::kFrontArgument, "[rank {}] the weight of a mean is how many samples are behind it, but is {}.", rank,
       weight);
}

}  // namespace

at::Tensor mean(const ProcessGroup& group, const at::Tensor& value, double weight) {
  check_weight(weight, group.rank());
  const at::NoGradGuard no_grad;
  at::Tensor flat = value.detach().to(at::kDouble).reshape({-1});
  flat = weight == 0 ? at::zeros_like(flat) : flat * weight;
  at::Tensor packed = at::cat({flat, at::full({1}, weight, flat.options())});
  if (group.size() > 1) C10dCommunicator(group.c10d()).sum(packed)->wait();
  const at::Tensor total = packed.slice(0, -1);
  if (total.item<double>() == 0) {
    fail(Code::kFrontArgument, "[rank {}] the weights of all ranks are 0, so there is no mean.", group.rank());
  }
  return (packed.slice(0, 0, -1) / total).reshape(value.sizes());
}

double mean(const ProcessGroup& group, double value, double weight) {
  return mean(group, at::scalar_tensor(value, at::kDouble), weight).item<double>();
}

void WeightedMean::add(double value, double weight) {
  check_weight(weight, 0);
  if (weight > 0) sum_ += value * weight;
  weight_ += weight;
}

double WeightedMean::reduce(const ProcessGroup& group) const {
  return mean(group, weight_ > 0 ? sum_ / weight_ : 0.0, weight_);
}

}  // namespace lockstep
