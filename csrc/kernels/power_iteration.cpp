#include "kernels/power_iteration.h"

#include <ATen/ATen.h>

#include <span>

#include "kernels/orthonormalize.h"

namespace lockstep {
namespace {

class OnHost final : public PowerIteration {
 public:
  OnHost(Matrices matrices, Settings settings) : matrices_(std::move(matrices)), settings_(settings) {}

  void first(const FactorTensors& tensors) override {
    tensors.flags.zero_();
    if (!settings_.error_feedback) tensors.m.zero_();
    add_finite(tensors.m, tensors.gradients, matrices_.runs, tensors.flags);
    for (const MatrixGroup& group : matrices_.groups) {
      at::Tensor p = group.p_of(tensors.p);
      orthonormalize(group.q_of(tensors.q), settings_.epsilon);
      at::bmm_out(p, group.m_of(tensors.m), group.q_of(tensors.q));
    }
  }

  bool second(const FactorTensors& tensors) override {
    if (!all_finite(tensors.p) || !all_finite(tensors.flags)) {
      if (settings_.error_feedback) subtract_finite(tensors.m, tensors.gradients, matrices_.runs);
      return false;
    }
    for (const MatrixGroup& group : matrices_.groups) {
      const at::Tensor p = group.p_of(tensors.p);
      orthonormalize(p, settings_.epsilon);
      at::Tensor q = group.q_of(tensors.q);
      at::bmm_out(q, group.m_of(tensors.m).transpose(1, 2), p);
    }
    return true;
  }

  void finish(const FactorTensors& tensors) override {
    size_t next = 0;
    for (const MatrixGroup& group : matrices_.groups) {
      finish(group, std::span(&matrices_.runs[next], static_cast<size_t>(group.count)), tensors);
      next += static_cast<size_t>(group.count);
    }
  }

 private:
  void finish(const MatrixGroup& group, std::span<const Run> runs, const FactorTensors& tensors) const {
    const at::Tensor p = group.p_of(tensors.p);
    const at::Tensor q = group.q_of(tensors.q);
    const bool in_place =
        tensors.gradients.scalar_type() == q.scalar_type() && runs.front().numel == group.rows * group.cols;
    if (!in_place) {
      const at::Tensor product = at::bmm(p, q.transpose(1, 2)).view(-1);
      std::vector<Run> from_group(runs.begin(), runs.end());
      for (Run& run : from_group) run.flat -= group.m;
      scatter(tensors.gradients, product, from_group);
      if (settings_.error_feedback) tensors.m.narrow(0, group.m, product.numel()).sub_(product);
      return;
    }
    for (int64_t i = 0; i < group.count; ++i) {
      const Run& run = runs[static_cast<size_t>(i)];
      at::Tensor mean = tensors.gradients.narrow(0, run.bucket, run.numel).view({group.rows, group.cols});
      at::mm_out(mean, p[i], q[i].t());
    }
    if (!settings_.error_feedback) return;
    for (const Run& run : runs) {
      tensors.m.narrow(0, run.flat, run.numel).sub_(tensors.gradients.narrow(0, run.bucket, run.numel));
    }
  }

  Matrices matrices_;
  Settings settings_;
};

}  // namespace

std::unique_ptr<PowerIteration> PowerIteration::make(const Matrices& matrices, const at::Tensor& bucket,
                                                     Settings settings) {
  if (!bucket.is_cpu()) return cuda::make_power_iteration(matrices, bucket, settings);
  return std::make_unique<OnHost>(matrices, settings);
}

}  // namespace lockstep
