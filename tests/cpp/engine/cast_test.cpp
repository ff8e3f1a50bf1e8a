// Casting kernels on the CPU against hand-checked values and ATen.
#include "kernels/cast.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace {

Segment segment_on(const at::Tensor& grad, int64_t offset) { return {grad.mutable_data_ptr(), offset, grad.numel()}; }

TEST(PackCast, ScalesBeforeItRoundsAndLeavesGapsAlone) {
  const at::Tensor grad = at::tensor({100352.0F, 1.0F + 0x1p-11F, -3e-8F, INFINITY, NAN});
  const at::Tensor bucket = at::full({8}, 7, at::kHalf);
  const std::vector<Segment> segments{segment_on(grad, 1), {nullptr, 6, 1}};
  pack_cast(bucket, segments, at::kFloat, 0.5);
  EXPECT_EQ(bucket[0].item<float>(), 7);
  EXPECT_EQ(bucket[1].item<float>(), 50176);  // 100352 does not fit, its half does
  EXPECT_EQ(bucket[2].item<float>(), 0.5);    // 0.5 + 2^-12 lies in the middle: to even
  EXPECT_EQ(bucket[3].item<float>(), 0);      // less than half of the smallest subnormal
  EXPECT_TRUE(std::isinf(bucket[4].item<float>()));
  EXPECT_TRUE(std::isnan(bucket[5].item<float>()));
  EXPECT_EQ(bucket[6].item<float>(), 0);  // no gradient
  EXPECT_EQ(bucket[7].item<float>(), 7);
}

TEST(PackCast, OverflowsToInfinity) {
  const at::Tensor grad = at::tensor({70000.0F, -70000.0F});
  const at::Tensor bucket = at::zeros({2}, at::kHalf);
  pack_cast(bucket, std::vector{segment_on(grad, 0)}, at::kFloat, 1);
  EXPECT_EQ(bucket[0].item<float>(), INFINITY);
  EXPECT_EQ(bucket[1].item<float>(), -INFINITY);
}

TEST(PackCast, IsATensCastBetweenAllDtypesOnManyThreads) {
  for (const auto wire : {at::kHalf, at::kBFloat16}) {
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      if (type == wire) continue;
      const at::Tensor long_one = at::randn({100003}).to(type);
      const at::Tensor short_one = at::randn({5}).to(type);
      const at::Tensor bucket = at::zeros({100016}, wire);
      const std::vector<Segment> segments{segment_on(short_one, 0), segment_on(long_one, 8)};
      pack_cast(bucket, segments, type, 1);
      EXPECT_TRUE(bucket.narrow(0, 8, 100003).equal(long_one.to(at::kFloat).to(wire)));
      EXPECT_TRUE(bucket.narrow(0, 0, 5).equal(short_one.to(at::kFloat).to(wire)));

      const at::Tensor expected = bucket.narrow(0, 8, 100003).to(type);
      unpack_cast(bucket, segments, type);
      EXPECT_TRUE(long_one.equal(expected));
    }
  }
}

}  // namespace
}  // namespace lockstep
