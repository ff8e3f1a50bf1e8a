// What every hook of the registry promises, whatever it does inside. Walks the registry: a new row is tested as it is.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "hooks/registry.h"
#include "reducer/reducer.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::ThreadCommunicator;
using Comm = std::shared_ptr<ThreadCommunicator>;

/// Arguments that let a hook compress from the first step on, and keep as much as it can.
HookArgs eager(const HookEntry& row) {
  HookArgs args;
  for (const HookParam& param : row.params) {
    if (param.name == "rank") args.set("rank", int64_t{32});
    if (param.name == "start_iteration") args.set("start_iteration", int64_t{0});
    if (param.name == "min_compression_rate") args.set("min_compression_rate", 0.0);
    if (param.name == "error_feedback") args.set("error_feedback", true);
  }
  return args;
}

/// How far from the mean an element may be, where the largest one of all is `largest`.
double tolerance(Fidelity fidelity, at::ScalarType type, double largest) {
  const double of_type = type == at::kHalf ? 0x1p-10 : type == at::kBFloat16 ? 0x1p-7 : 1e-5;
  switch (fidelity) {
    case Fidelity::kExact:
      return 2 * of_type * largest;
    case Fidelity::kHalf:
      return 2 * std::max(of_type, 0x1p-7) * largest;
    case Fidelity::kQuantized:
      return (2.0 / 127 + 2 * of_type) * largest;
    case Fidelity::kLowRank:  // of full rank in these tests
      return (1e-3 + 4 * of_type) * largest;
  }
  return 0;
}

/// A replica with given gradients in place of a model.
class Subject {
 public:
  Subject(const HookEntry& row, Comm comm, const std::vector<std::vector<int64_t>>& shapes,
          at::ScalarType type = at::kFloat, ReducerOptions options = {})
      : row_(row), comm_(std::move(comm)) {
    ParamList params;
    for (const auto& shape : shapes) {
      params.names.push_back(fmt::format("p{}", params.size()));
      params.sparse.push_back(false);
      params.tensors.push_back(at::zeros(shape, type).set_requires_grad(true));
    }
    tensors_ = params.tensors;
    reducer_ = Reducer::create(std::move(params), comm_, std::move(options), make_comm_hook(row.name, eager(row)));
  }

  /// The gradients of one rank in one step: the same numbers in every process.
  [[nodiscard]] std::vector<at::Tensor> gradients(int rank, int step) const {
    std::vector<at::Tensor> grads;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& param = tensors_[i];
      const at::Tensor k = at::arange(param.numel(), at::kDouble);
      const double phase = 1.0 + 0.7 * rank + 0.3 * step + static_cast<double>(i);
      grads.push_back(at::sin(k * 0.37 * phase + phase).view(param.sizes()).to(param.scalar_type()));
    }
    return grads;
  }

  void step(int step) { reduce(gradients(comm_->rank(), step)); }
  void reduce(const std::vector<at::Tensor>& grads) {
    for (size_t i = 0; i < grads.size(); ++i) tensors_[i].mutable_grad() = grads[i].clone();
    reducer_->sync_gradients();
  }

  [[nodiscard]] std::vector<at::Tensor> mean(int step) const {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < comm_->size(); ++rank) {
      const std::vector<at::Tensor> grads = gradients(rank, step);
      for (size_t i = 0; i < grads.size(); ++i) {
        const at::Tensor wide = grads[i].to(grads[i].is_complex() ? at::kComplexDouble : at::kDouble);
        rank == 0 ? sums.push_back(wide.clone()) : (void)sums[i].add_(wide);
      }
    }
    for (const at::Tensor& sum : sums) sum.div_(comm_->size());
    return sums;
  }

  void expect_mean(int step) const {
    const std::vector<at::Tensor> expected = mean(step);
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor& grad = tensors_[i].grad();
      ASSERT_EQ(grad.scalar_type(), tensors_[i].scalar_type());
      ASSERT_EQ(grad.sizes(), tensors_[i].sizes());
      if (grad.numel() == 0) continue;
      const double off = at::abs(grad.to(expected[i].scalar_type()) - expected[i]).max().item<double>();
      EXPECT_LE(off, tolerance(row_.fidelity, grad.scalar_type(), 1.0)) << row_.name << " parameter " << i;
    }
    expect_equal_on_all_ranks();
  }

  void expect_equal_on_all_ranks() const {
    for (const at::Tensor& param : tensors_) {
      const at::Tensor mine = param.grad().contiguous();
      if (mine.numel() == 0) continue;
      const at::Tensor bits = (mine.is_complex() ? at::view_as_real(mine) : mine).reshape(-1).view(at::kByte);
      const at::Tensor all = at::empty({comm_->size() * bits.numel()}, bits.options());
      comm_->all_gather(all, bits)->wait();
      EXPECT_TRUE(all.view({comm_->size(), -1}).eq(bits).all().item<bool>()) << row_.name;
    }
  }

  [[nodiscard]] std::vector<at::Tensor> grads() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& param : tensors_) copies.push_back(param.grad().clone());
    return copies;
  }
  [[nodiscard]] bool finite() const {
    for (const at::Tensor& param : tensors_) {
      if (!at::isfinite(param.grad()).all().item<bool>()) return false;
    }
    return true;
  }
  [[nodiscard]] Reducer& reducer() { return *reducer_; }
  [[nodiscard]] Comm comm() const { return comm_; }

 private:
  HookEntry row_;
  Comm comm_;
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<Reducer> reducer_;
};

const std::vector<std::vector<int64_t>> kShapes{{12, 7}, {7}, {5, 3, 2}, {}, {12, 7}, {0}, {1, 9}};

class HookContract : public ::testing::TestWithParam<size_t> {
 protected:
  const HookEntry& row() const { return comm_hooks()[GetParam()]; }
};

TEST_P(HookContract, GivesEveryRankTheSameWithinItsFidelityOfTheMean) {
  for (const int ranks : {2, 3}) {
    for (const auto placement : {GradPlacement::kOwnMemory, GradPlacement::kBucketView}) {
      run_ranks(ranks, [&](Comm comm) {
        Subject subject(row(), comm, kShapes, at::kFloat, {.placement = placement});
        subject.step(0);
        subject.expect_mean(0);
      });
    }
  }
}

TEST_P(HookContract, IsExactInAWorldOfOne) {
  run_ranks(1, [&](Comm comm) {
    Subject subject(row(), comm, kShapes);
    for (int step = 0; step < 3; ++step) {
      subject.step(step);
      const auto expected = subject.gradients(0, step);
      const auto grads = subject.grads();
      for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(grads[i].equal(expected[i])) << row().name;
    }
  });
}

TEST_P(HookContract, KeepsEveryDtypeAndSendsComplexGradientsAsTheyAre) {
  for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16}) {
    run_ranks(2, [&](Comm comm) {
      Subject subject(row(), comm, kShapes, type);
      subject.step(0);
      subject.expect_mean(0);
    });
  }
  run_ranks(2, [&](Comm comm) {
    const HookEntry exact{row().name, Fidelity::kExact, row().params, row().make};
    Subject subject(exact, comm, kShapes, at::kComplexFloat);
    subject.step(0);
    subject.expect_mean(0);
  });
}

TEST_P(HookContract, SendsSparseGradientsAsTheyAre) {
  run_ranks(2, [&](Comm comm) {
    at::Tensor table = at::zeros({4, 3}).set_requires_grad(true);
    ParamList params{{table}, {"table"}, {true}};
    auto reducer = Reducer::create(std::move(params), comm, {}, make_comm_hook(row().name, eager(row())));
    const at::Tensor rows = at::tensor({comm->rank(), 3}, at::kLong).unsqueeze(0);
    table.mutable_grad() = at::sparse_coo_tensor(rows, at::full({2, 3}, 0.1F), {4, 3}, at::TensorOptions());
    reducer->sync_gradients();
    const at::Tensor expected = at::tensor({0.05F, 0.05F, 0.0F, 0.1F}).unsqueeze(1).expand({4, 3});
    EXPECT_TRUE(at::allclose(table.grad().to_dense(), expected, 1e-6)) << row().name;
  });
}

TEST_P(HookContract, SurvivesANewPlanBetweenSteps) {
  run_ranks(2, [&](Comm comm) {
    Subject subject(row(), comm, kShapes);
    Subject undisturbed(row(), comm, kShapes);
    for (int step = 0; step < 3; ++step) {
      subject.step(step);
      undisturbed.step(step);
      subject.expect_equal_on_all_ranks();
      const auto grads = subject.grads();
      const auto expected = undisturbed.grads();
      for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(at::allclose(grads[i], expected[i], 1e-3, 1e-3));
      subject.reducer().reset(comm);  // lays out a plan anew
    }
  });
}

TEST_P(HookContract, BringsInfinityToEveryRankAndToNoLaterStep) {
  for (const double poison : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    run_ranks(3, [&](Comm comm) {
      Subject subject(row(), comm, {{12, 7}, {7}});
      Subject healthy(row(), comm, {{12, 7}, {7}});
      subject.step(0);
      healthy.step(0);
      auto grads = subject.gradients(comm->rank(), 1);
      if (comm->rank() == 1) grads[0].view(-1)[3] = poison;
      subject.reduce(grads);
      EXPECT_FALSE(subject.finite()) << row().name << " lost " << poison;
      EXPECT_FALSE(std::isfinite(subject.grads()[0].view(-1)[3].item<float>()));
      subject.expect_equal_on_all_ranks();
      for (int step = 2; step < 4; ++step) {
        subject.step(step);
        healthy.step(step);
        EXPECT_TRUE(subject.finite()) << row().name << " kept " << poison;
        const auto after = subject.grads();
        const auto expected = healthy.grads();
        for (size_t i = 0; i < after.size(); ++i) {
          EXPECT_TRUE(at::allclose(after[i], expected[i], 0.05, 0.05))
              << row().name << " after " << poison << " in step " << step << ":\n"
              << after[i] << expected[i];
        }
      }
    });
  }
}

TEST_P(HookContract, GoesOnBitForBitFromASavedState) {
  run_ranks(2, [&](Comm comm) {
    Subject first(row(), comm, kShapes);
    for (int step = 0; step < 3; ++step) first.step(step);
    const HookState saved = first.reducer().hook_state();
    Subject resumed(row(), comm, kShapes);
    if (!saved.empty()) resumed.reducer().load_hook_state(saved);
    for (int step = 3; step < 6; ++step) {
      first.step(step);
      resumed.step(step);
      const auto expected = first.grads();
      const auto grads = resumed.grads();
      for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(grads[i].equal(expected[i])) << row().name << step;
    }
  });
}

TEST_P(HookContract, NamesItsArgumentsWhenGivenAnotherOne) {
  try {
    (void)make_comm_hook(row().name, {{"nosuch", true}});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("nosuch"), HasSubstr(std::string(row().name)), HasSubstr("LS-038")));
    for (const HookParam& param : row().params) EXPECT_THAT(error.what(), HasSubstr(std::string(param.name)));
  }
}

TEST_P(HookContract, SignsItsArguments) {
  const std::string by_default = make_comm_hook(row().name)->signature();
  EXPECT_THAT(by_default, HasSubstr(std::string(row().name)));
  EXPECT_EQ(make_comm_hook(row().name)->signature(), by_default);
  if (row().fidelity != Fidelity::kExact && row().fidelity != Fidelity::kHalf) {
    EXPECT_NE(make_comm_hook(row().name, eager(row()))->signature(), by_default);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, HookContract, ::testing::Range(size_t{0}, comm_hooks().size()),
                         [](const auto& info) { return std::string(comm_hooks()[info.param].name); });

TEST(HookRegistry, NamesTheKnownHooksWhenAskedForAnother) {
  try {
    (void)make_comm_hook("al_reduce");
    FAIL() << "accepted";
  } catch (const Error& error) {
    for (const HookEntry& row : comm_hooks()) EXPECT_THAT(error.what(), HasSubstr(std::string(row.name)));
  }
}

TEST(HookRegistry, RefusesValuesOfAnotherTypeOrOutOfRange) {
  const auto text_of = [](const HookArgs& args) -> std::string {
    try {
      (void)make_comm_hook("power_sgd", args);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(text_of({{"rank", int64_t{0}}}), HasSubstr("from 1 to 32"));
  EXPECT_THAT(text_of({{"rank", int64_t{33}}}), HasSubstr("from 1 to 32"));
  EXPECT_THAT(text_of({{"start_iteration", int64_t{-1}}}), HasSubstr("start_iteration must be from 0"));
  EXPECT_THAT(text_of({{"rank", 2.0}}), AllOf(HasSubstr("of type float"), HasSubstr("rank: int")));
  EXPECT_THAT(text_of({{"warm_start", int64_t{1}}}), HasSubstr("warm_start: bool"));
  EXPECT_THAT(text_of({{"epsilon", NAN}}), HasSubstr("finite"));
  EXPECT_EQ(text_of({{"epsilon", int64_t{1}}}), "accepted");  // an integer is a number
}

TEST(CastHooks, ReduceMoreThanFp16HoldsWhereTheMeanFits) {
  run_ranks(4, [](Comm comm) {
    const HookEntry& fp16 = comm_hooks()[1];
    Subject subject(fp16, comm, {{3}});
    subject.reduce({at::tensor({80000.0F, comm->rank() == 0 ? 1e6F : 0.0F, 1.0F})});
    const at::Tensor grad = subject.grads().front();
    EXPECT_TRUE(std::isinf(grad[0].item<float>()));  // the mean itself is above 65504
    EXPECT_TRUE(std::isinf(grad[1].item<float>()));
    subject.reduce({at::tensor({comm->rank() == 0 ? 200704.0F : 0.0F, 0.0F, 1.0F})});
    EXPECT_EQ(subject.grads().front()[0].item<float>(), 50176.0F);  // 200704 itself does not fit
  });
}

}  // namespace
}  // namespace lockstep
