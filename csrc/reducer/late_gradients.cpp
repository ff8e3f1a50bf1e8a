#include "reducer/late_gradients.h"

#include <ATen/ATen.h>

#include <limits>

namespace lockstep {
namespace {

/// What a rank owes: its gradient, times `scale`. One that the user has cleared since cannot be had any more.
at::Tensor owed(const at::Tensor& param, double scale) {
  const at::Tensor& grad = param.grad();
  return grad.defined() ? grad.mul(scale) : at::full_like(param, std::numeric_limits<double>::quiet_NaN());
}

at::Tensor flat_reals(const at::Tensor& tensor) {
  const at::Tensor contiguous = tensor.contiguous();
  return (contiguous.is_complex() ? at::view_as_real(contiguous) : contiguous).view(-1);
}

}  // namespace

void add_late_gradients(const GradBuffers& buffers, BucketId id, const ParamList& params, const UsageTracker& usage,
                        double scale, Communicator& comm, const at::Tensor& mean) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> parts;
  for (const ParamId param : buffers.plan().bucket(id).params) {
    if (!usage.late_anywhere(param)) continue;
    targets.push_back(buffers.slot_view(mean, param));
    // Of the parameter's dtype on every rank: the mean may be of the wire's.
    const at::Tensor& tensor = params.tensors[index(param)];
    parts.push_back(flat_reals(usage.late_here(param) ? owed(tensor, scale) : at::zeros_like(tensor)));
  }
  if (targets.empty()) return;

  const at::Tensor sum = at::cat(parts);
  comm.sum(sum)->wait();

  int64_t offset = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    at::Tensor part = sum.narrow(0, offset, parts[i].numel());
    offset += parts[i].numel();
    if (targets[i].is_complex()) part = at::view_as_complex(part.view({-1, 2}));
    targets[i].add_(part.view(targets[i].sizes()));
  }
}

}  // namespace lockstep
