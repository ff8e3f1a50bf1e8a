// The kernels of compressing hooks against their calculation on the CPU. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/power_iteration.h"
#include "kernels/quantize.h"

namespace lockstep {
namespace {

class HookKernelsCuda : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
    at::manual_seed(1);
  }
};

at::Tensor on_device(const at::Tensor& tensor) { return tensor.defined() ? tensor.to(at::kCUDA) : tensor; }

TEST_P(HookKernelsCuda, QuantizingGivesTheBitsOfTheCpu) {
  constexpr int64_t kRanks = 3;
  constexpr int64_t kNumel = 10 * kQuantizationBlock + 100;  // 11 blocks, 4 for each rank
  const at::Tensor bucket = at::randn({kNumel}, at::kFloat).mul_(1e-3).to(GetParam());
  bucket.narrow(0, 3 * kQuantizationBlock, kQuantizationBlock).zero_();
  bucket.narrow(0, 5 * kQuantizationBlock + 7, 1).fill_(INFINITY);
  BlockLayout here{
      .filled = at::full({12}, kQuantizationBlock, at::kInt), .ids = {}, .blocks_per_rank = 4, .ranks = kRanks};
  for (const auto& [block, filled] : {std::pair{1, 200}, {4, 1}, {6, 0}, {10, 100}, {11, 0}})
    here.filled[block] = filled;
  for (const bool stochastic : {false, true}) {
    if (stochastic) here.ids = at::randint(INT32_MIN, INT32_MAX, {12}, at::kInt);
    const BlockLayout there{on_device(here.filled), on_device(here.ids), here.blocks_per_rank, here.ranks};
    for (const bool feedback : {false, true}) {
      const at::Tensor error = feedback ? at::randn({kNumel}).mul_(1e-5) : at::Tensor();
      if (feedback) error.narrow(0, 6 * kQuantizationBlock, kQuantizationBlock).zero_();  // a gap never has any
      if (feedback) error.narrow(0, 1 * kQuantizationBlock + 200, 56).zero_();
      if (feedback) error.narrow(0, 4 * kQuantizationBlock + 1, 255).zero_();
      const at::Tensor device_error = on_device(error);
      const at::Tensor device_bucket = on_device(bucket);
      const at::Tensor records = quantize_bucket(bucket, here, error, 17);
      ASSERT_TRUE(records.equal(quantize_bucket(device_bucket, there, device_error, 17).cpu()));
      if (feedback) {
        ASSERT_TRUE(error.equal(device_error.cpu()));
      }

      for (int64_t rank = 0; rank < kRanks; ++rank) {
        const at::Tensor sum = sum_records(records, here, rank, error, 18);
        ASSERT_TRUE(sum.view(at::kByte).equal(
            sum_records(on_device(records), there, rank, device_error, 18).view(at::kByte).cpu()));
        if (feedback) {
          ASSERT_TRUE(error.equal(device_error.cpu()));
        }
      }
      dequantize_bucket(records, here, bucket);
      dequantize_bucket(on_device(records), there, device_bucket);
      ASSERT_TRUE(at::equal(bucket.nan_to_num(-9), device_bucket.cpu().nan_to_num(-9)));
      bucket.nan_to_num_(1e-3);
    }
  }
}

/// Matrices of three shapes, one of them with more rows than one block sums, with gaps between them in the bucket.
struct Example {
  Matrices matrices;
  int64_t bucket = 5;
  int64_t m = 0;
  int64_t p = 0;
  int64_t q = 0;

  explicit Example(int64_t rank) {
    add({.rows = 40, .cols = 64, .count = 3}, rank);
    add({.rows = 2500, .cols = 9, .count = 1}, rank);
    add({.rows = 33, .cols = 300, .count = 2}, rank);
  }
  void add(MatrixGroup group, int64_t rank) {
    group.rank = std::min({rank, group.rows, group.cols});
    group.m = m;
    group.p = p;
    group.q = q;
    for (int64_t i = 0; i < group.count; ++i) {
      matrices.runs.push_back({bucket, m, group.rows * group.cols});
      bucket += group.rows * group.cols + 3;
      m += group.rows * group.cols;
    }
    p += group.count * group.rows * group.rank;
    q += group.count * group.cols * group.rank;
    matrices.groups.push_back(group);
  }
  [[nodiscard]] FactorTensors tensors(at::ScalarType type) const {
    const auto state = type == at::kDouble ? at::kDouble : at::kFloat;
    return {at::randn({bucket}, at::kFloat).to(type), at::randn({m}, state).mul_(0.1), at::zeros({p}, state),
            at::randn({q}, state), at::zeros({static_cast<int64_t>(matrices.runs.size())}, state)};
  }
};

void expect_near(const at::Tensor& here, const at::Tensor& there, double allowed, const char* what) {
  const double norm = here.norm().item<double>();
  EXPECT_LE(here.to(at::kDouble).sub(there.cpu().to(at::kDouble)).norm().item<double>(), allowed * norm) << what;
}

TEST_P(HookKernelsCuda, PowerIterationGivesWhatTheCpuGives) {
  for (const int64_t rank : {1, 2, 4, 7, 12, 32}) {
    for (const bool feedback : {true, false}) {
      const Example example(rank);
      const FactorTensors here = example.tensors(GetParam());
      const FactorTensors there{on_device(here.gradients), on_device(here.m), on_device(here.p), on_device(here.q),
                                on_device(here.flags)};
      const PowerIteration::Settings settings{.epsilon = rank == 2 ? 1e-8 : 0, .error_feedback = feedback};
      const auto on_host = PowerIteration::make(example.matrices, here.gradients, settings);
      const auto on_gpu = PowerIteration::make(example.matrices, there.gradients, settings);
      on_host->first(here);
      on_gpu->first(there);
      expect_near(here.m, there.m, 1e-6, "M");
      EXPECT_TRUE(there.flags.cpu().eq(0).all().item<bool>());
      ASSERT_TRUE(on_host->second(here) && on_gpu->second(there));
      on_host->finish(here);
      on_gpu->finish(there);
      // The factors may differ by a rotation; what they stand for may not.
      const double half = at::isReducedFloatingType(GetParam()) ? 1e-2 : 2e-5;
      expect_near(here.gradients, there.gradients, half, "mean");
      if (feedback) expect_near(here.m, there.m, 1e-4, "error");
    }
  }
}

TEST_P(HookKernelsCuda, WhatIsNotFiniteStaysInItsMatrix) {
  const Example example(4);
  const FactorTensors start = example.tensors(GetParam());
  start.gradients.narrow(0, example.matrices.runs[1].bucket + 3, 1).fill_(NAN);
  const FactorTensors tensors{on_device(start.gradients), on_device(start.m), on_device(start.p), on_device(start.q),
                              on_device(start.flags)};
  const auto iteration = PowerIteration::make(example.matrices, tensors.gradients, {});
  iteration->first(tensors);
  iteration->second(tensors);
  iteration->finish(tensors);
  for (size_t i = 0; i < example.matrices.runs.size(); ++i) {
    const lockstep::Run& run = example.matrices.runs[i];
    const at::Tensor mean = tensors.gradients.narrow(0, run.bucket, run.numel);
    EXPECT_EQ(at::isfinite(mean).all().item<bool>(), i != 1);
    EXPECT_EQ(at::isnan(mean).all().item<bool>(), i == 1);
    if (i == 1)
      expect_near(start.m.narrow(0, run.flat, run.numel), tensors.m.narrow(0, run.flat, run.numel), 1e-5, "error");
  }
  EXPECT_TRUE(at::isfinite(tensors.m).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(AllTypes, HookKernelsCuda,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace lockstep
