// Moments on a GPU. Skipped where there is none.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include "comm/moment.h"

namespace lockstep {
namespace {

class MomentCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

TEST_F(MomentCuda, UsesAnEventAgainOnceNobodyHoldsIt) {
  const c10::Stream stream = c10::cuda::getCurrentCUDAStream(0).unwrap();
  std::shared_ptr<c10::Event> event = timed_event(stream);
  const c10::Event* const first = event.get();
  std::shared_ptr<c10::Event> held = event;
  event.reset();
  EXPECT_NE(timed_event(stream).get(), first) << "somebody still holds it";
  held.reset();
  EXPECT_EQ(timed_event(stream).get(), first);
}

TEST_F(MomentCuda, CountsWhatTheDeviceDidBetweenTwoMomentsAlsoWithUsedEvents) {
  const at::Device gpu(at::kCUDA, 0);
  const at::Tensor large = at::ones({64 << 20}, gpu);
  for (int round = 0; round < 3; ++round) {
    const Moment begin = Moment::here(gpu);
    for (int i = 0; i < 10; ++i) large.add_(1);
    const Moment end = Moment::here(gpu);
    c10::cuda::getCurrentCUDAStream(0).synchronize();
    ASSERT_TRUE(begin.has_passed() && end.has_passed());
    EXPECT_GT(begin.seconds_to(end), 1e-4);  // 5 GB of memory traffic
    EXPECT_LT(begin.seconds_to(end), 10);
  }
}

}  // namespace
}  // namespace lockstep
