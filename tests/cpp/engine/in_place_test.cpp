// Large gradients that are reduced where they lie, over a communicator that averages for free.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "hooks/registry.h"
#include "reducer/reducer.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::ThreadCommunicator;
using testing::ThreadWorld;

/// Says of itself that it averages for free, as NCCL's does, and remembers what it was given.
class Averaging final : public ThreadCommunicator {
 public:
  using ThreadCommunicator::ThreadCommunicator;
  [[nodiscard]] std::optional<int64_t> worth_averaging_alone() const override { return 256 * 1024; }
  TransferPtr average_all(std::span<const at::Tensor> tensors) override {
    for (const at::Tensor& tensor : tensors) given.push_back(tensor.data_ptr());
    return ThreadCommunicator::average_all(tensors);
  }
  std::vector<void*> given;
};

constexpr int64_t kSide = 256;  // 256 KiB of fp32: just large enough

/// y = x * (sum of large + small * 3), so that the gradients are x everywhere, and 3 x.
struct Model {
  at::Tensor large = at::ones({kSide, kSide}).set_requires_grad(true);
  at::Tensor small = at::ones({4}).set_requires_grad(true);

  [[nodiscard]] ParamList params() const { return {{large, small}, {"large", "small"}, {false, false}}; }
  [[nodiscard]] at::Tensor forward(double x) const { return x * (large.sum() + (small * 3).sum()); }
};

void run_two_ranks(const std::function<void(std::shared_ptr<Averaging>)>& body) {
  auto world = std::make_shared<ThreadWorld>(2);
  run_ranks(2, [&](const std::shared_ptr<ThreadCommunicator>& other) {
    body(std::make_shared<Averaging>(world, other->rank()));
  });
}

void step(Reducer& reducer, const at::Tensor& y) {
  reducer.expect_backward({&y, 1});
  torch::autograd::backward({y}, {});
}

bool all_equal(const at::Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); }

TEST(InPlace, ReducesTheGradientItselfAndPacksOnlySmallOnes) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"));
    for (int i = 0; i < 3; ++i) {
      model.large.mutable_grad().reset();
      model.small.mutable_grad().reset();
      comm->given.clear();
      reducer->begin_step();
      step(*reducer, model.forward(2 * comm->rank() + i));  // the mean of x over ranks is 1 + i
      EXPECT_TRUE(all_equal(model.large.grad(), 1 + i));
      EXPECT_TRUE(all_equal(model.small.grad(), 3 * (1 + i)));
      EXPECT_THAT(comm->given, ::testing::Contains(model.large.grad().data_ptr()));
      EXPECT_THAT(comm->given, ::testing::Not(::testing::Contains(model.small.grad().data_ptr())));
    }
  });
}

TEST(InPlace, AddsWhatWasAccumulatedBefore) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"));
    reducer->begin_step();
    reducer->expect_local_backward();
    torch::autograd::backward({model.forward(10 * comm->rank())}, {});
    reducer->begin_step();
    step(*reducer, model.forward(1));
    EXPECT_TRUE(all_equal(model.large.grad(), 6));  // (1 + 11) / 2
  });
}

TEST(InPlace, AGradientInAnotherOrderIsSentInThatOfItsParameter) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"));
    const at::Tensor ramp = at::arange(kSide * kSide, at::kFloat).view({kSide, kSide});
    if (comm->rank() == 1) model.large.mutable_grad() = at::zeros({kSide, kSide}).t();  // accumulated into as it is
    reducer->begin_step();
    step(*reducer, (model.large * ramp).sum() * (1 + 2 * comm->rank()) + model.small.sum());
    EXPECT_TRUE(at::equal(model.large.grad(), 2 * ramp));
    EXPECT_EQ(model.large.grad().is_contiguous(), comm->rank() == 0);
  });
}

TEST(InPlace, OneThatNobodyUsesStaysAbsentAndOneUsedOnOneRankCountsHalf) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {.graph = GraphKind::kDynamic}, make_comm_hook("allreduce"));
    for (int i = 0; i < 4; ++i) {
      model.large.mutable_grad().reset();
      model.small.mutable_grad().reset();
      reducer->begin_step();
      const bool uses = i >= 2 && comm->rank() == 0;  // from the third step on it comes late
      step(*reducer, model.small.sum() + (uses ? model.large.sum() * 4 : at::tensor(0.0)));
      EXPECT_EQ(model.large.grad().defined(), i >= 2);
      if (i >= 2) {
        EXPECT_TRUE(all_equal(model.large.grad(), 2)) << i;
      }
    }
  });
}

TEST(InPlace, ARankWithoutDataTakesPartAndTheOthersDivideByThoseThatHaveSome) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"));
    reducer->begin_step();
    step(*reducer, model.forward(1));
    if (comm->rank() == 1) {
      reducer->begin_step();
      reducer->shadow_step();
      EXPECT_TRUE(all_equal(model.large.grad(), 1));
      return;
    }
    reducer->set_live_ranks([] { return 1; });
    model.large.mutable_grad().reset();
    model.small.mutable_grad().reset();
    reducer->begin_step();
    step(*reducer, model.forward(5));
    EXPECT_TRUE(all_equal(model.large.grad(), 5));
    EXPECT_TRUE(all_equal(model.small.grad(), 15));
  });
}

TEST(InPlace, AnotherHookGetsEverythingInItsBucket) {
  run_two_ranks([](const std::shared_ptr<Averaging>& comm) {
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"));
    reducer->set_hook(make_comm_hook("bf16"));
    reducer->begin_step();
    step(*reducer, model.forward(2 * comm->rank()));
    EXPECT_TRUE(all_equal(model.large.grad(), 1));
    EXPECT_TRUE(comm->given.empty());
  });
}

}  // namespace
}  // namespace lockstep
