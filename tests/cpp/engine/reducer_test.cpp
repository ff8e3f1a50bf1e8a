// The path of a gradient, with ranks as threads of this process and no Python.
#include "reducer/reducer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/error.h"
#include "hooks/registry.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::ThreadCommunicator;
using Comm = std::shared_ptr<ThreadCommunicator>;

/// Three scalars: y = x * (a + b * c), so that the gradients are x, x * c and x * b.
struct Model {
  at::Tensor a = at::tensor(1.0).set_requires_grad(true);
  at::Tensor b = at::tensor(2.0).set_requires_grad(true);
  at::Tensor c = at::tensor(3.0).set_requires_grad(true);

  [[nodiscard]] ParamList params() const { return {{a, b, c}, {"a", "b", "c"}, {false, false, false}}; }
  [[nodiscard]] at::Tensor forward(double x) const { return x * (a + b * c); }
  void zero() {
    for (at::Tensor* p : {&a, &b, &c}) p->mutable_grad().reset();
  }
};

void backward(const at::Tensor& loss) { torch::autograd::backward({loss}, {}); }

std::shared_ptr<Reducer> reducer_for(const Model& model, const Comm& comm, ReducerOptions options = {}) {
  return Reducer::create(model.params(), comm, std::move(options), make_comm_hook("allreduce"));
}

void step(Reducer& reducer, const Model& model, double x) {
  reducer.begin_step();
  const at::Tensor y = model.forward(x);
  reducer.expect_backward({&y, 1});
  backward(y);
}

TEST(Reducer, LeavesTheMeanOverRanksInEveryGradient) {
  run_ranks(3, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    for (int i = 0; i < 3; ++i) {
      model.zero();
      step(*reducer, model, comm->rank() + i);  // the mean of x over ranks is 1 + i
      EXPECT_NEAR(model.a.grad().item<double>(), 1 + i, 1e-6);
      EXPECT_NEAR(model.b.grad().item<double>(), 3 * (1 + i), 1e-6);
      EXPECT_NEAR(model.c.grad().item<double>(), 2 * (1 + i), 1e-6);
    }
  });
}

TEST(Reducer, IssuesTwoCollectivesAStepForOneBucketAndOneMoreToAgreeOnThePlan) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    std::vector<int64_t> calls;
    for (int i = 0; i < 3; ++i) {
      step(*reducer, model, 1);
      calls.push_back(comm->num_calls());
    }
    EXPECT_THAT(calls, ElementsAre(2, 5, 7));  // guard and bucket; in the second step the plan
    EXPECT_TRUE(reducer->has_final_plan());
  });
}

/// Notes at which stage its rank waits for the agreement on a pass.
class StageNoting final : public ThreadCommunicator {
 public:
  StageNoting(std::shared_ptr<testing::ThreadWorld> world, int rank, std::shared_ptr<Progress> progress)
      : ThreadCommunicator(std::move(world), rank), progress_(std::move(progress)) {}

  TransferPtr max(at::Tensor data) override {
    return std::make_unique<Noting>(ThreadCommunicator::max(std::move(data)), *this);
  }
  std::vector<Stage> stages;

 private:
  struct Noting final : Transfer {
    Noting(TransferPtr inner, StageNoting& comm) : inner_(std::move(inner)), comm_(comm) {}
    void wait() override {
      comm_.stages.push_back(comm_.progress_->stage());
      inner_->wait();
    }
    TransferPtr inner_;
    StageNoting& comm_;
  };
  std::shared_ptr<Progress> progress_;
};

TEST(Reducer, IsSeenWaitingWhereverItAgreesWithTheOthers) {
  auto world = std::make_shared<testing::ThreadWorld>(2);
  run_ranks(2, [&](const Comm& rank) {
    auto progress = std::make_shared<Progress>();
    auto comm = std::make_shared<StageNoting>(world, rank->rank(), progress);
    Model model;
    auto reducer = Reducer::create(model.params(), comm, {}, make_comm_hook("allreduce"), progress);
    for (int i = 0; i < 3; ++i) step(*reducer, model, 1);  // before the first bucket, then with another plan, then last
    EXPECT_THAT(comm->stages, ElementsAre(Stage::kBucketWait, Stage::kBucketWait, Stage::kBucketWait));
    EXPECT_EQ(progress->stage(), Stage::kBetweenSteps);
  });
}

TEST(Reducer, TakesThePlanOfRankZeroWhenRanksSawDifferentOrders) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm, {.limits = {1}});
    reducer->begin_step();
    // Rank 0 finishes the gradient of `a` first, rank 1 last: three separate paths, sent backward one by one.
    reducer->expect_backward({});
    for (const at::Tensor& p :
         comm->rank() == 0 ? std::vector{model.a, model.b, model.c} : std::vector{model.c, model.b, model.a}) {
      backward(p * 1);
    }
    EXPECT_TRUE(reducer->begin_step());
    EXPECT_THAT(reducer->bucket_params(), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  });
}

TEST(Reducer, AccumulatesLocallyWithoutAnAnnouncementAndReducesItAllWithTheNext) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    reducer->begin_step();
    backward(model.forward(10 * comm->rank()));
    EXPECT_EQ(comm->num_calls(), 0);
    EXPECT_EQ(model.a.grad().item<double>(), 10 * comm->rank());
    step(*reducer, model, 1);
    EXPECT_EQ(model.a.grad().item<double>(), 6);  // (1 + 11) / 2
  });
}

TEST(Reducer, ABackwardThatReachesNoOutputOpensThePassAtTheFirstGradient) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    reducer->begin_step();
    const at::Tensor returned = model.forward(1);
    reducer->expect_backward({&returned, 1});
    backward(model.forward(comm->rank() * 2));  // a loss that is not computed from what was returned
    EXPECT_EQ(model.a.grad().item<double>(), 1);
  });
}

TEST(Reducer, AGraphThatOutlivesTheReducerIsJustAGraph) {
  run_ranks(1, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    reducer->begin_step();
    const at::Tensor y = model.forward(4);
    reducer->expect_backward({&y, 1});
    reducer.reset();
    backward(y);
    EXPECT_EQ(model.a.grad().item<double>(), 4);
    EXPECT_EQ(comm->num_calls(), 0);
  });
}

TEST(Reducer, NamesMissingParametersAtTheNextStep) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    reducer->begin_step();
    const at::Tensor y = model.a * 2;
    reducer->expect_backward({&y, 1});
    backward(y);
    try {
      reducer->begin_step();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("did not receive grad for rank " + std::to_string(comm->rank()) + ": b, c\n"),
                        HasSubstr("2 of 3 parameters are missing")));
    }
  });
}

TEST(Reducer, FindsUnusedParametersAndLeavesThoseUsedNowhereAlone) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm, {.graph = GraphKind::kDynamic, .first_limits = {1}});
    for (int i = 0; i < 4; ++i) {
      model.zero();
      reducer->begin_step();
      // `b` is used on rank 0 only, and from the third step on, when it is presumed unused; `c` never.
      const at::Tensor y = model.a * 2 + (i >= 2 && comm->rank() == 0 ? model.b * 8 : at::tensor(0.0));
      reducer->expect_backward({&y, 1});
      backward(y);
      EXPECT_EQ(model.a.grad().item<double>(), 2);
      EXPECT_FALSE(model.c.grad().defined());
      EXPECT_EQ(model.b.grad().defined(), i >= 2);
      if (i >= 2) {
        EXPECT_EQ(model.b.grad().item<double>(), 4);
      }
    }
  });
}

TEST(Reducer, AGradientThatArrivesAfterItsBucketCostsOneMoreReductionOnce) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm, {.graph = GraphKind::kDynamic, .first_limits = {1}});
    std::vector<int64_t> calls;
    for (int i = 0; i < 4; ++i) {
      model.zero();
      reducer->begin_step();
      // b hangs behind a in the graph: it comes last, long after the empty bucket of b has left.
      const at::Tensor y = i == 0 ? model.a * 1 : model.a * (model.b * 1);
      reducer->expect_backward({&y, 1});
      const int64_t before = comm->num_calls();
      backward(y);
      calls.push_back(comm->num_calls() - before);
      if (i > 0) {
        EXPECT_EQ(model.b.grad().item<double>(), 1);
      }
    }
    EXPECT_THAT(calls, ElementsAre(5, 6, 5, 5));  // guard, three buckets, and the exchange of what was used
  });
}

TEST(Reducer, AStaticGraphIsRecordedOnceAndExchangedOnce) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    reducer->set_static_graph();
    std::vector<int64_t> calls;
    for (int i = 0; i < 4; ++i) {
      model.zero();
      reducer->begin_step();
      const at::Tensor y = (comm->rank() + 1) * model.a + model.b;  // c is never used
      reducer->expect_backward({&y, 1});
      backward(y);
      calls.push_back(comm->num_calls());
      EXPECT_EQ(model.a.grad().item<double>(), 1.5);
      EXPECT_FALSE(model.c.grad().defined());
    }
    EXPECT_THAT(calls, ElementsAre(3, 5, 8, 10));  // guard and bucket, the exchange once, the plan once
  });
}

TEST(Reducer, DividesByTheRanksThatStillHaveDataWhenToldSo) {
  run_ranks(2, [](Comm comm) {
    Model model;
    auto reducer = reducer_for(model, comm);
    step(*reducer, model, 1);
    if (comm->rank() == 1) {  // out of data: adopts the same plan, then shadows the step
      reducer->begin_step();
      reducer->shadow_step();
      return;
    }
    reducer->set_live_ranks([] { return 1; });
    model.zero();
    step(*reducer, model, 5);
    EXPECT_EQ(model.a.grad().item<double>(), 5);
  });
}

TEST(Reducer, RefusesParametersOrOptionsThatMakeNoSense) {
  run_ranks(1, [](Comm comm) {
    EXPECT_THROW(Reducer::create({}, comm, {}, make_comm_hook("allreduce")), Error);
    Model model;
    EXPECT_THROW(reducer_for(model, comm, {.first_limits = {}}), std::invalid_argument);
    EXPECT_THROW(reducer_for(model, comm, {.first_limits = {0}}), std::invalid_argument);
    EXPECT_THROW((void)make_comm_hook("nosuch"), Error);
  });
}

}  // namespace
}  // namespace lockstep
