// Code of the user's own around and inside the wrapper: a hook as a class, exceptions of one rank, modules that change,
// wrappers that go at a bad time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "nets.h"
#include "threads.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using testing::batch_of;
using ::testing::Each;
using testing::expect_near;
using testing::expected;
using testing::filled;
using testing::gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::on_ranks;
using torch::Tensor;

/// The mean of this bucket and of the ones before: needs a memory, which it names, saves and loads.
class RunningMeanHook final : public CommHook {
 public:
  [[nodiscard]] std::string name() const override { return "running_mean"; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    return std::make_unique<Pending>(*this, comm.average(bucket.memory), bucket.memory);
  }

  void on_pass_ended() override { ++passes_; }
  [[nodiscard]] HookState state() const override {
    HookState state{{"passes", torch::tensor(passes_)}};
    if (sum_.defined()) state.emplace("sum", sum_);
    return state;
  }
  std::vector<std::string> load_state(const HookState& state, std::span<const HookSubject> /*subjects*/,
                                      int /*rank*/) override {
    passes_ = state.at("passes").item<int64_t>();
    sum_ = state.at("sum").clone();
    return {};
  }

 private:
  class Pending final : public PendingMean {
   public:
    Pending(RunningMeanHook& hook, TransferPtr transfer, Tensor memory)
        : hook_(hook), transfer_(std::move(transfer)), memory_(std::move(memory)) {}
    Tensor wait() override {
      transfer_->wait();
      hook_.sum_ = hook_.sum_.defined() ? hook_.sum_ + memory_ : memory_.clone();
      return hook_.sum_ / (hook_.passes_ + 1);
    }

   private:
    RunningMeanHook& hook_;
    TransferPtr transfer_;
    Tensor memory_;
  };

  int64_t passes_ = 0;
  Tensor sum_;
};

/// One weight; its gradient is the sum of the batch.
torch::nn::Linear one_weight() { return filled(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false))); }

TEST(OwnCode, AHookOfTheUsersOwnClassKeepsAMemoryThatIsSavedAndLoaded) {
  on_ranks(2, [](const ProcessGroup& group) {
    const auto step = [&](DistributedDataParallel<torch::nn::Linear>& model, float value) {
      model.zero_grad();
      model(torch::full({1, 1}, value + static_cast<float>(group.rank()))).sum().backward();
      return model.parameters().front().grad().item<double>();
    };
    DistributedDataParallel model(one_weight(), group);
    model.register_comm_hook(std::make_unique<RunningMeanHook>());
    EXPECT_EQ(step(model, 1), 1.5);  // ranks have 1 and 2
    EXPECT_EQ(step(model, 3), 2.5);  // the mean of 1.5 and 3.5
    const HookState saved = model.comm_hook_state();
    EXPECT_EQ(saved.at("passes").item<int64_t>(), 2);

    DistributedDataParallel resumed(one_weight(), group);
    resumed.register_comm_hook(std::make_unique<RunningMeanHook>());
    resumed.load_comm_hook_state(saved);
    EXPECT_NEAR(step(resumed, 6), 11.5 / 3, 1e-6);  // of 1.5, 3.5 and 6.5
  });
}

TEST(OwnCode, HooksThatDifferBetweenRanksAreAnErrorOnEveryRank) {
  const auto texts = testing::outcomes_in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(one_weight(), group);
    if (group.rank() == 0) model.register_comm_hook(std::make_unique<RunningMeanHook>());
    for (int step = 0; step < 2; ++step) model(torch::ones({1, 1})).sum().backward();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("different comm hooks"), HasSubstr("[LS-019]"))));
}

TEST(OwnCode, ABackwardThatThrowsOnOneRankIsToldToAllAndTheModelTrainsOn) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  on_ranks(2, [&](const ProcessGroup& group) {
    DistributedDataParallel model(filled(Net()), group, Options{}.bucket_cap_mb(1e-6));
    const auto backward = [&] {
      model.zero_grad();
      loss_of(model(batch_of(group.rank()))).backward();
    };
    for (int step = 0; step < 2; ++step) backward();  // past the change of plan
    if (group.rank() == 1) {
      const Tensor& weight = model.module()->first->weight;
      const auto hook = weight.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
      EXPECT_THROW(backward(), std::exception);
      weight.remove_hook(hook);
    } else {
      backward();
      // A mean without all ranks does not look like one.
      EXPECT_TRUE(model.module()->first->weight.grad().isnan().all().item<bool>());
    }
    try {
      backward();
      ADD_FAILURE() << "nobody was told";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1 swallowed an exception"), HasSubstr("[LS-019]")));
    }
    for (int step = 0; step < 2; ++step) backward();
    expect_near(gradients(model.parameters()), wanted, 1e-6);
  });
}

TEST(OwnCode, AForwardThatThrewOnOneRankAndWasRepeatedIsToldToAllUnlessItIsAllowed) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  on_ranks(2, [&](const ProcessGroup& group) {
    for (const bool allowed : {false, true}) {
      DistributedDataParallel model(filled(Net()), group, Options{}.uneven_forwards(allowed));
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        const bool throws = step == 1 && group.rank() == 1;
        if (throws) {
          EXPECT_THROW((void)model(batch_of(0, 4, 5)), c10::Error);  // a batch of the wrong width
        }
        const auto backward = [&] { loss_of(model(batch_of(group.rank()))).backward(); };
        if (step == 1 && !allowed) {
          EXPECT_THROW(backward(), Error);
        } else {
          backward();
          expect_near(gradients(model.parameters()), wanted, 1e-6);
        }
      }
    }
  });
}

TEST(OwnCode, AModuleThatWasMovedAfterWrappingIsNamed) {
  on_ranks(1, [](const ProcessGroup& group) {
    torch::nn::Linear layer(2, 2);
    DistributedDataParallel model(layer, group);
    // What Module::to does between a CPU and a GPU; here there is no second device that has memory.
    const Tensor moved = torch::empty({2, 2}, torch::kMeta);
    layer->weight.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
    try {
      (void)model(torch::ones({1, 2}));
      ADD_FAILURE() << "a moved module went unnoticed";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'weight' was Float on cpu"), HasSubstr("is Float on meta now"),
                                      HasSubstr("move or convert the module first")));
    }
  });
}

TEST(OwnCode, HalfPrecisionGradientsAreTheMeanAndStayHalf) {
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    on_ranks(2, [type](const ProcessGroup& group) {
      torch::nn::Linear layer(torch::nn::LinearOptions(4, 2).bias(false));
      layer->to(type);
      DistributedDataParallel model(layer, group, Options{}.gradient_as_bucket_view(type == at::kHalf));
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        // The gradient is the input: 1 and 2 on the ranks, exact in both types.
        model(torch::full({1, 4}, group.rank() + 1.0, type)).sum().backward();
        EXPECT_EQ(layer->weight.grad().scalar_type(), type);
        EXPECT_TRUE(at::equal(layer->weight.grad(), torch::full({2, 4}, 1.5, type)));
      }
    });
  }
}

TEST(OwnCode, AWrapperThatIsDestroyedInsideABackwardHookDoesNotCrash) {
  on_ranks(2, [](const ProcessGroup& group) {
    Net net = filled(Net());
    auto model = std::make_optional<DistributedDataParallel<Net>>(net, group);
    // `second` comes first in backward, so `first` and the end of the pass come when the wrapper is gone.
    net->second->weight.register_hook([&model](const Tensor& gradient) {
      model.reset();
      return gradient;
    });
    loss_of((*model)(batch_of(group.rank()))).backward();
    Net alone = filled(Net());
    loss_of(alone(batch_of(group.rank()))).backward();
    EXPECT_FALSE(model);
    expect_near(gradients(net->parameters()), gradients(alone->parameters()), 1e-7);
  });
}

TEST(OwnCode, TwoThreadsOfARankMayEachTrainAModelInAWorldOfTheirOwn) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  const auto train = [&] {
    on_ranks(2, [&](const ProcessGroup& group) {
      DistributedDataParallel model(filled(Net()), group);
      for (int step = 0; step < 5; ++step) {
        model.zero_grad();
        loss_of(model(batch_of(group.rank()))).backward();
        expect_near(gradients(model.parameters()), wanted, 1e-6);
      }
    });
  };
  std::thread beside(train);
  train();
  beside.join();
}

}  // namespace
}  // namespace lockstep
