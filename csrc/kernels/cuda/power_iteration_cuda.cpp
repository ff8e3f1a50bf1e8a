// The CUDA half of the power iteration: lays the table of matrices out once, then only passes pointers.
#include <ATen/ATen.h>

#include "kernels/cuda/on_device.h"
#include "kernels/cuda/power_iteration.h"
#include "kernels/power_iteration.h"

namespace lockstep::cuda {
namespace {

class OnDevicePowerIteration final : public PowerIteration {
 public:
  OnDevicePowerIteration(const Matrices& matrices, const at::Tensor& bucket, Settings settings) : settings_(settings) {
    const OnDevice device(bucket);
    std::vector<FactoredMatrix> rows;
    for (const MatrixGroup& group : matrices.groups) {
      for (int64_t i = 0; i < group.count; ++i) {
        const Run& run = matrices.runs[rows.size()];
        rows.push_back({.gradient = run.bucket,
                        .filled = run.numel,
                        .m = group.m + i * group.rows * group.cols,
                        .p = group.p + i * group.rows * group.rank,
                        .q = group.q + i * group.cols * group.rank,
                        .rows = group.rows,
                        .cols = group.cols,
                        .rank = static_cast<int32_t>(group.rank)});
      }
    }
    shape_.count = static_cast<int32_t>(rows.size());
    shape_.element = element_of(bucket);
    partial_numel_ = place_tiles(rows.data(), shape_);
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(FactoredMatrix));
    table_ = at::from_blob(rows.data(), {bytes}, at::dtype(at::kByte)).to(bucket.device());
  }

  void first(const FactorTensors& tensors) override {
    const OnDevice device(tensors.gradients);
    const FactoredBucket bucket = on(tensors);
    check(launch_orthonormalize(bucket, Factor::kQ, settings_.epsilon, device.stream()), tensors, "of Q");
    check(launch_first_product(bucket, settings_.error_feedback, device.stream()), tensors, "of P");
  }

  bool second(const FactorTensors& tensors) override {
    const OnDevice device(tensors.gradients);
    FactoredBucket bucket = on(tensors);
    const at::Tensor partial = at::empty({partial_numel_}, tensors.q.options());
    bucket.partial = partial.mutable_data_ptr();
    check(launch_orthonormalize(bucket, Factor::kP, settings_.epsilon, device.stream()), tensors, "of P");
    check(launch_second_product(bucket, device.stream()), tensors, "of Q");
    return true;
  }

  void finish(const FactorTensors& tensors) override {
    const OnDevice device(tensors.gradients);
    check(launch_approximation(on(tensors), settings_.error_feedback, device.stream()), tensors, "of the mean");
  }

 private:
  [[nodiscard]] FactoredBucket on(const FactorTensors& tensors) const {
    FactoredBucket bucket = shape_;
    bucket.matrices = static_cast<const FactoredMatrix*>(table_.const_data_ptr());
    bucket.gradients = tensors.gradients.mutable_data_ptr();
    bucket.m = tensors.m.mutable_data_ptr();
    bucket.p = tensors.p.mutable_data_ptr();
    bucket.q = tensors.q.mutable_data_ptr();
    bucket.flags = tensors.flags.mutable_data_ptr();
    return bucket;
  }
  void check(cudaError_t status, const FactorTensors& tensors, const char* what) const {
    if (status == cudaSuccess) return;
    cuda::check(status, tensors.gradients, "the calculation " + std::string(what) + " (PowerSGD)");
  }

  Settings settings_;
  FactoredBucket shape_;  // without its pointers
  int64_t partial_numel_ = 0;
  at::Tensor table_;
};

}  // namespace

std::unique_ptr<PowerIteration> make_power_iteration(const Matrices& matrices, const at::Tensor& bucket,
                                                     PowerIteration::Settings settings) {
  return std::make_unique<OnDevicePowerIteration>(matrices, bucket, settings);
}

}  // namespace lockstep::cuda
