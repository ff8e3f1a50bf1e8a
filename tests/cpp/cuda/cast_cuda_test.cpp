// The casting CUDA kernel against the one on the CPU. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cast.h"
#include "kernels/cuda/cast.h"

namespace lockstep {
namespace {

constexpr double kUntouched = 7;

class CastPackCuda : public ::testing::TestWithParam<std::pair<at::ScalarType, at::ScalarType>> {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
    at::manual_seed(1);
  }
  [[nodiscard]] at::ScalarType wire() const { return GetParam().first; }
  [[nodiscard]] at::ScalarType grads() const { return GetParam().second; }
};

TEST_P(CastPackCuda, GivesTheBitsOfTheCpuWhereverThingsLie) {
  // 4096 elements are a tile: sizes on both sides of its borders.
  const std::vector<int64_t> sizes{1, 0, 17, 100000, 5, 4095, 4096, 4097, 8193, 3};
  for (const int64_t shift : {0, 1, 2, 3}) {
    for (const int64_t gap : {64, 0, 1, 2}) {
      std::vector<at::Tensor> here;
      std::vector<at::Tensor> there;
      std::vector<Segment> segments_here;
      std::vector<Segment> segments_there;
      int64_t offset = gap;
      for (const int64_t size : sizes) {
        here.push_back(at::randn({size + shift}, at::kDouble).mul_(1e5).to(grads()).narrow(0, shift, size));
        there.push_back(at::empty({size + shift}, at::dtype(grads()).device(at::kCUDA)).narrow(0, shift, size));
        there.back().copy_(here.back());
        const bool absent = size == 5;
        segments_here.push_back({absent ? nullptr : here.back().mutable_data_ptr(), offset, size});
        segments_there.push_back({absent ? nullptr : there.back().mutable_data_ptr(), offset, size});
        offset += size + gap;
      }
      const at::Tensor expected = at::full({offset}, kUntouched, wire());
      const at::Tensor bucket = at::full({offset}, kUntouched, at::dtype(wire()).device(at::kCUDA));
      for (const double scale : {1.0, 1.0 / 3}) {
        pack_cast(expected, segments_here, grads(), scale);
        pack_cast(bucket, segments_there, grads(), scale);
        ASSERT_TRUE(bucket.cpu().equal(expected)) << "shift " << shift << ", gap " << gap << ", scale " << scale;
      }
      unpack_cast(expected, segments_here, grads());
      unpack_cast(bucket, segments_there, grads());
      for (size_t i = 0; i < here.size(); ++i) ASSERT_TRUE(there[i].cpu().equal(here[i]));
    }
  }
}

TEST_P(CastPackCuda, LaunchesOnceForAThousandGradients) {
  const at::Tensor all = at::randn({16000}, at::kDouble).to(grads()).to(at::kCUDA);
  std::vector<Segment> segments;
  for (int64_t i = 0; i < 1000; ++i) segments.push_back({all.narrow(0, 16 * i, 16).mutable_data_ptr(), 16 * i, 16});
  const at::Tensor bucket = at::zeros({16000}, at::dtype(wire()).device(at::kCUDA));
  const auto element = [](at::ScalarType type) {
    return type == at::kFloat    ? cuda::Element::kFloat
           : type == at::kDouble ? cuda::Element::kDouble
           : type == at::kHalf   ? cuda::Element::kHalf
                                 : cuda::Element::kBFloat16;
  };
  const cuda::Launched result = cuda::launch_pack_cast(bucket.mutable_data_ptr(), segments, element(wire()),
                                                       element(grads()), 0.5, c10::cuda::getCurrentCUDAStream());
  EXPECT_EQ(result.status, cudaSuccess);
  EXPECT_EQ(result.launches, 1);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CastPackCuda,
                         ::testing::Values(std::pair{at::kHalf, at::kFloat}, std::pair{at::kHalf, at::kDouble},
                                           std::pair{at::kHalf, at::kBFloat16}, std::pair{at::kBFloat16, at::kFloat},
                                           std::pair{at::kBFloat16, at::kDouble}, std::pair{at::kBFloat16, at::kHalf}));

}  // namespace
}  // namespace lockstep
