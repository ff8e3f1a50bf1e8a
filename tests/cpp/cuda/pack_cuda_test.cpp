// The CUDA kernels against plain arithmetic on the CPU. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"
#include "kernels/cuda/pack.h"
#include "kernels/pack.h"

namespace lockstep {
namespace {

using cuda::Element;
using ::testing::HasSubstr;

constexpr double kThird = 1.0 / 3.0;  // rounds in every dtype
constexpr double kUntouched = 7.0;
constexpr int64_t kMargin = 8;  // elements around each gradient that nobody may write

/// How far a gradient starts from an aligned address, and how far its slot from the end of the one before; in elements.
struct Placement {
  int64_t grad_shift = 0;
  int64_t slot_gap = 64;
};

/// Gradients and their bucket on the GPU, and what the bucket must hold after packing.
struct Layout {
  std::vector<at::Tensor> homes;  // a gradient with its margins
  std::vector<at::Tensor> grads;
  std::vector<Segment> segments;
  at::Tensor bucket;

  [[nodiscard]] at::Tensor packed(double scale) const {
    at::Tensor result = at::full(bucket.sizes(), kUntouched, at::dtype(bucket.dtype()));
    for (size_t i = 0; i < grads.size(); ++i) {
      at::Tensor slot = result.narrow(0, segments[i].offset, segments[i].numel);
      if (segments[i].grad == nullptr) {
        slot.zero_();
      } else {
        slot.copy_(scale == 1.0 ? grads[i].cpu() : grads[i].cpu().mul(scale));
      }
    }
    return result;
  }
};

Layout make_layout(const std::vector<int64_t>& sizes, at::ScalarType dtype, Placement placement = {}) {
  Layout layout;
  int64_t offset = placement.slot_gap % 64;
  for (const int64_t size : sizes) {
    const int64_t home = size + 2 * kMargin + placement.grad_shift;
    layout.homes.push_back(at::randn({home}, at::kDouble).to(dtype).to(at::kCUDA));
    layout.grads.push_back(layout.homes.back().narrow(0, kMargin + placement.grad_shift, size));
    layout.segments.push_back({layout.grads.back().mutable_data_ptr(), offset, size});
    offset += size + placement.slot_gap;
  }
  layout.bucket = at::full({offset}, kUntouched, at::dtype(dtype).device(at::kCUDA));
  return layout;
}

Element element_of(at::ScalarType dtype) {
  return dtype == at::kFloat    ? Element::kFloat
         : dtype == at::kDouble ? Element::kDouble
         : dtype == at::kHalf   ? Element::kHalf
                                : Element::kBFloat16;
}

/// Packs or unpacks like the public functions, and returns how many kernels that took.
int pack_launches(const Layout& layout, double scale) {
  const cuda::Launched result =
      cuda::launch_pack(layout.bucket.mutable_data_ptr(), layout.segments, element_of(layout.bucket.scalar_type()),
                        scale, c10::cuda::getCurrentCUDAStream());
  EXPECT_EQ(result.status, cudaSuccess);
  return result.launches;
}

int unpack_launches(const Layout& layout) {
  const cuda::Launched result =
      cuda::launch_unpack(layout.bucket.const_data_ptr(), layout.segments, element_of(layout.bucket.scalar_type()),
                          c10::cuda::getCurrentCUDAStream());
  EXPECT_EQ(result.status, cudaSuccess);
  return result.launches;
}

int64_t free_bytes() {
  size_t free = 0;
  size_t total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<int64_t>(free) : 0;
}

class PackCuda : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
    at::manual_seed(1);
  }
};

TEST_P(PackCuda, EqualsThePlainReferenceWhereverThingsLie) {
  // 16384 bytes are a tile: sizes on both sides of its borders, in every dtype.
  const std::vector<int64_t> sizes{1, 0, 17, 100000, 5, 2048, 4096, 8192, 8193, 33333, 16383, 3};
  for (const int64_t shift : {0, 1, 2, 3, 5}) {
    for (const int64_t gap : {64, 0, 1, 2, 4}) {
      Layout layout = make_layout(sizes, GetParam(), {shift, gap});
      for (const double scale : {kThird, 1.0, -0.5}) {
        pack(layout.bucket, layout.segments, scale);
        EXPECT_TRUE(layout.bucket.cpu().equal(layout.packed(scale)))
            << "scale " << scale << ", gradients shifted by " << shift << ", gaps of " << gap;
      }
    }
  }
}

TEST_P(PackCuda, UnpackIsTheWayBackAndWritesNothingElse) {
  for (const Placement placement : {Placement{}, Placement{1, 2}, Placement{3, 0}}) {
    Layout layout = make_layout({4, 70000, 9, 0, 20000}, GetParam(), placement);
    std::vector<at::Tensor> before;
    for (const at::Tensor& home : layout.homes) before.push_back(home.cpu());
    pack(layout.bucket, layout.segments, 1.0);
    for (at::Tensor& grad : layout.grads) grad.zero_();
    unpack(layout.bucket, layout.segments);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(layout.homes[i].cpu().equal(before[i])) << "gradient " << i;
  }
}

TEST_P(PackCuda, AnAbsentGradientIsZerosOnTheWayInAndNothingOnTheWayBack) {
  Layout layout = make_layout({5, 50001, 6, 77}, GetParam(), {1, 3});
  layout.segments[0].grad = nullptr;
  layout.segments[1].grad = nullptr;
  pack(layout.bucket, layout.segments, 0.5);
  EXPECT_TRUE(layout.bucket.cpu().equal(layout.packed(0.5)));
  const at::Tensor absent = layout.homes[1].cpu();
  unpack(layout.bucket, layout.segments);
  EXPECT_TRUE(layout.homes[1].cpu().equal(absent));
}

TEST_P(PackCuda, AGradientThatIsItsSlotIsScaledInPlaceAndCostsNothingOtherwise) {
  Layout layout = make_layout({3000, 40000}, GetParam(), {0, 3});
  layout.bucket.copy_(at::randn(layout.bucket.sizes(), at::kDouble));
  layout.grads[1] = layout.bucket.narrow(0, layout.segments[1].offset, layout.segments[1].numel);
  layout.segments[1].grad = layout.grads[1].mutable_data_ptr();
  const at::Tensor scaled = layout.grads[1].cpu().mul(kThird);
  pack(layout.bucket, layout.segments, kThird);
  EXPECT_TRUE(layout.grads[1].cpu().equal(scaled));

  layout.segments.erase(layout.segments.begin());
  EXPECT_EQ(pack_launches(layout, kThird), 1);
  EXPECT_EQ(pack_launches(layout, 1.0), 0);
  EXPECT_EQ(unpack_launches(layout), 0);
}

TEST_P(PackCuda, NothingToMoveLaunchesNothing) {
  const Layout layout = make_layout({0, 0, 0}, GetParam());
  EXPECT_EQ(pack_launches(layout, kThird), 0);
  EXPECT_EQ(pack_launches({.homes = {}, .grads = {}, .segments = {}, .bucket = layout.bucket}, kThird), 0);
}

TEST_P(PackCuda, OneLaunchPerBucketOfUpTo1600Gradients) {
  for (const auto& [count, launches] :
       {std::pair<size_t, int>{1, 1}, {64, 1}, {65, 1}, {257, 1}, {1025, 1}, {1600, 1}, {1601, 2}, {2500, 2}}) {
    std::vector<int64_t> sizes(count);
    for (size_t i = 0; i < count; ++i) sizes[i] = static_cast<int64_t>(i * i % 311) + 1;
    Layout layout = make_layout(sizes, GetParam(), {1, 1});
    EXPECT_EQ(pack_launches(layout, kThird), launches) << count << " gradients";
    EXPECT_TRUE(layout.bucket.cpu().equal(layout.packed(kThird))) << count << " gradients";
    for (at::Tensor& grad : layout.grads) grad.zero_();
    EXPECT_EQ(unpack_launches(layout), launches) << count << " gradients";
    const at::Tensor bucket = layout.bucket.clone();
    layout.bucket.fill_(kUntouched);
    pack(layout.bucket, layout.segments, 1.0);
    EXPECT_TRUE(layout.bucket.equal(bucket)) << count << " gradients";
  }
}

TEST_P(PackCuda, OneLargeGradientAmongManyTinyOnes) {
  std::vector<int64_t> sizes(1000, 7);
  sizes[500] = 12'500'000;
  Layout layout = make_layout(sizes, GetParam());
  EXPECT_EQ(pack_launches(layout, kThird), 1);
  EXPECT_TRUE(layout.bucket.cpu().equal(layout.packed(kThird)));
}

TEST_P(PackCuda, AScaleOfOneKeepsEveryBit) {
  Layout layout = make_layout({1000}, GetParam());
  const at::Tensor bits = at::randint(0, 256, {1000 * layout.bucket.element_size()}, at::dtype(at::kByte));
  layout.grads[0].copy_(bits.view(GetParam()));  // quiet and signalling NaNs among them
  pack(layout.bucket, layout.segments, 1.0);
  const at::Tensor slot = layout.bucket.narrow(0, layout.segments[0].offset, 1000);
  EXPECT_TRUE(slot.view(at::kByte).cpu().equal(layout.grads[0].contiguous().view(at::kByte).cpu()));
}

TEST_P(PackCuda, RunsOnTheCurrentStream) {
  Layout layout = make_layout({300000}, GetParam());
  const at::Tensor expected = layout.packed(kThird);
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    pack(layout.bucket, layout.segments, kThird);
  }
  side.synchronize();
  EXPECT_TRUE(layout.bucket.cpu().equal(expected));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PackCuda, ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

class LargePackCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  }

  /// One gradient of `numel` elements followed by three of 1000, checked piece by piece on the device.
  static void check(int64_t numel, at::ScalarType dtype, int launches) {
    const int64_t total = numel + 3000;
    if (free_bytes() < 5 * total * static_cast<int64_t>(c10::elementSize(dtype)) / 2) {
      GTEST_SKIP() << "needs " << 5 * total * static_cast<int64_t>(c10::elementSize(dtype)) / 2 / 1'000'000'000
                   << " GB of device memory";
    }
    const auto options = at::dtype(dtype).device(at::kCUDA);
    Layout layout;
    const at::Tensor all = at::empty({total}, options).random_(1, 100);
    layout.bucket = at::full({total}, kUntouched, options);
    int64_t offset = 0;
    for (const int64_t size : {numel, int64_t{1000}, int64_t{1000}, int64_t{1000}}) {
      layout.segments.push_back({all.narrow(0, offset, size).mutable_data_ptr(), offset, size});
      offset += size;
    }
    EXPECT_EQ(pack_launches(layout, 0.5), launches);
    constexpr int64_t kPiece = int64_t{1} << 27;
    for (int64_t at = 0; at < total; at += kPiece) {
      const int64_t count = std::min(kPiece, total - at);
      ASSERT_TRUE(layout.bucket.narrow(0, at, count).equal(all.narrow(0, at, count).mul(0.5))) << "from " << at;
    }
  }
};

TEST_F(LargePackCuda, MoreElementsThan31BitsCount) { check((int64_t{1} << 31) + 5, at::kBFloat16, 1); }

// Offsets are counted from every multiple of 8 GiB: what starts behind the first one takes a second launch.
TEST_F(LargePackCuda, ABucketBeyond8GiB) { check((int64_t{1} << 30) - 5, at::kDouble, 2); }

TEST(PackCudaErrors, OtherDtypesAreRefusedByName) {
  if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  const at::Tensor bucket = at::zeros({4}, at::dtype(at::kInt).device(at::kCUDA));
  try {
    pack(bucket, {}, 1.0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("dtype Int"));
  }
}

}  // namespace
}  // namespace lockstep
