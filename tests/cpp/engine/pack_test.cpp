// The kernels against loops that can be read at a glance.
#include "kernels/pack.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

namespace lockstep {
namespace {

constexpr int64_t kGap = 3;

/// Gradients of the given sizes, and a bucket in which they lie with gaps between them.
struct Layout {
  std::vector<at::Tensor> grads;
  std::vector<Segment> segments;
  at::Tensor bucket;
};

Layout make_layout(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  Layout layout;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    layout.grads.push_back(at::randn({size}, at::kDouble).to(dtype));
    layout.segments.push_back({layout.grads.back().mutable_data_ptr(), offset, size});
    offset += size + kGap;
  }
  layout.bucket = at::full({offset}, 7.0, at::dtype(dtype));
  return layout;
}

class PackTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(PackTest, ScalesEveryGradientIntoItsSlotAndLeavesTheGapsAlone) {
  // 100000 elements are enough to be split over threads, in the middle of a segment.
  Layout layout = make_layout({1, 0, 17, 100000, 5, 33333}, GetParam());
  pack(layout.bucket, layout.segments, 1.0 / 3.0);
  for (size_t i = 0; i < layout.grads.size(); ++i) {
    const Segment& segment = layout.segments[i];
    const at::Tensor slot = layout.bucket.narrow(0, segment.offset, segment.numel);
    EXPECT_TRUE(slot.equal(layout.grads[i].mul(1.0 / 3.0))) << "segment " << i;
    EXPECT_TRUE(layout.bucket.narrow(0, segment.offset + segment.numel, kGap).eq(7.0).all().item<bool>());
  }
}

TEST_P(PackTest, UnpackIsTheWayBack) {
  Layout layout = make_layout({4, 70000, 9}, GetParam());
  std::vector<at::Tensor> before;
  for (const at::Tensor& grad : layout.grads) before.push_back(grad.clone());
  pack(layout.bucket, layout.segments, 1.0);
  for (at::Tensor& grad : layout.grads) grad.zero_();
  unpack(layout.bucket, layout.segments);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(layout.grads[i].equal(before[i]));
}

TEST_P(PackTest, AnAbsentGradientIsZerosOnTheWayInAndNothingOnTheWayBack) {
  Layout layout = make_layout({4, 6}, GetParam());
  layout.segments[0].grad = nullptr;
  pack(layout.bucket, layout.segments, 0.5);
  EXPECT_TRUE(layout.bucket.narrow(0, 0, 4).eq(0).all().item<bool>());
  unpack(layout.bucket, layout.segments);
  EXPECT_TRUE(layout.bucket.narrow(0, 4 + kGap, 6).equal(layout.grads[1]));
}

TEST_P(PackTest, AGradientThatIsItsSlotIsScaledInPlace) {
  const at::Tensor bucket = at::ones({8}, at::dtype(GetParam()));
  auto* base = static_cast<char*>(bucket.mutable_data_ptr());
  const std::vector<Segment> segments{{base + 2 * bucket.element_size(), 2, 4}};
  pack(bucket, segments, 0.25);
  const at::Tensor expected = at::ones({8}, at::dtype(GetParam()));
  expected.narrow(0, 2, 4).fill_(0.25);
  EXPECT_TRUE(bucket.equal(expected));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PackTest, ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace lockstep
