// What a program in C++ hears when ranks, arguments or modules do not fit, and the small helpers around the wrapper.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "threads.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::outcomes;
using testing::outcomes_in_group;
using torch::Tensor;

Environment variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

std::string refusal(const Environment& environment) {
  try {
    (void)read_launch(environment);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Launch, ReadsTorchrunMpirunAndSrun) {
  const Launch torchrun = read_launch(variables({{"RANK", "3"},
                                                 {"WORLD_SIZE", "4"},
                                                 {"LOCAL_RANK", "1"},
                                                 {"LOCAL_WORLD_SIZE", "2"},
                                                 {"MASTER_ADDR", "a"},
                                                 {"MASTER_PORT", "5"},
                                                 {"TORCHELASTIC_RUN_ID", "x"},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_EQ(std::tie(torchrun.rank, torchrun.world_size, torchrun.master_port), std::make_tuple(3, 4, 5));
  EXPECT_EQ(torchrun.local_rank, 1);
  EXPECT_TRUE(torchrun.agent_store);
  EXPECT_EQ(torchrun.attempt, "2");
  const Launch openmpi = read_launch(variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  EXPECT_EQ(openmpi.rank, 1);
  EXPECT_EQ(openmpi.master_addr, "127.0.0.1");
  const Launch mpich = read_launch(variables({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "b"}}));
  EXPECT_EQ(mpich.master_addr, "b");
  const Launch slurm = read_launch(variables({{"SLURM_PROCID", "5"},
                                              {"SLURM_NTASKS", "8"},
                                              {"SLURM_LOCALID", "1"},
                                              {"SLURM_STEP_ID", "0"},
                                              {"SLURM_JOB_ID", "70123"},
                                              {"SLURM_STEP_NODELIST", "n[07-08,12]"}}));
  EXPECT_EQ(std::tie(slurm.rank, slurm.world_size, slurm.master_addr, slurm.master_port),
            std::make_tuple(5, 8, std::string("n07"), 20123));
  const Launch by_hand =
      read_launch(variables({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}}));
  EXPECT_EQ(by_hand.local_rank, 1);
  EXPECT_EQ(read_launch(variables({}), /*allow_single=*/true).world_size, 1);
}

TEST(Launch, NamesTheVariableThatIsMissingOrWrongAndHowToLaunch) {
  EXPECT_THAT(refusal(variables({})),
              AllOf(HasSubstr("WORLD_SIZE"), HasSubstr("torchrun --standalone"), HasSubstr("[LS-061]")));
  EXPECT_THAT(refusal(variables({{"WORLD_SIZE", "2"}})), HasSubstr("variable RANK"));
  EXPECT_THAT(refusal(variables({{"RANK", "2"}, {"WORLD_SIZE", "2"}})), HasSubstr("RANK is '2'"));
  EXPECT_THAT(refusal(variables({{"RANK", "x"}, {"WORLD_SIZE", "2"}})), HasSubstr("RANK is 'x'"));
  EXPECT_THAT(refusal(variables({{"RANK", "0"}, {"WORLD_SIZE", "2"}})), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(refusal(variables({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}})), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(refusal(variables({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}})), HasSubstr("WORLD_SIZE"));  // no srun
}

TEST(Group, NamesTheRanksThatAreMissing) {
  const GroupOptions options = testing::quick_options().start_timeout(std::chrono::milliseconds(300));
  const auto texts = outcomes(4, [&](int rank, const auto& store) {
    if (rank % 2 == 0) (void)init_process_group({.rank = rank, .world_size = 4}, options, store);
  });
  EXPECT_THAT(texts, ElementsAre(HasSubstr("missing 1, 3"), "", HasSubstr("missing 1, 3"), ""));
}

TEST(Group, RefusesABackendOnEveryRank) {
  const GroupOptions options = testing::quick_options();
  const auto mixed = outcomes(2, [&](int rank, const auto& store) {
    (void)init_process_group({.rank = rank, .world_size = 2, .local_rank = 99},
                             GroupOptions(options).backend(rank == 0 ? "gloo" : "nccl"), store);
  });
  EXPECT_THAT(mixed, Each(HasSubstr("NCCL was asked for, but local rank 99 has no GPU of its own")));
  const auto interface = outcomes(2, [&](int rank, const auto& store) {
    (void)init_process_group({.rank = rank, .world_size = 2},
                             GroupOptions(options).interface(rank == 0 ? "lo" : "nothing0"), store);
  });
  EXPECT_THAT(interface, Each(HasSubstr("no network interface 'nothing0'")));
}

TEST(Group, SubgroupsReduceAmongTheirOwnAndBarriersNameWhoIsMissing) {
  on_ranks(3, [](const ProcessGroup& group) {
    const ProcessGroup pair = group.new_group({2, 0});
    const ProcessGroup again = group.new_group({2, 0});
    EXPECT_EQ(static_cast<bool>(pair), group.rank() != 1);
    if (pair) {
      EXPECT_EQ(pair.rank(), group.rank() == 2 ? 0 : 1);
      EXPECT_EQ(mean(pair, group.rank() * 1.0), 1.0);
      EXPECT_EQ(mean(again, group.rank() + 1.0), 2.0);
    } else {
      EXPECT_THROW((void)pair.rank(), Error);
    }
    group.barrier();
    group.barrier();
    if (group.rank() == 1) return;
    try {
      group.barrier(std::chrono::milliseconds(200));
      ADD_FAILURE() << "rank 1 was not there";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("did not reach barrier 2 within 0.2 s: missing 1"));
    }
  });
  EXPECT_THAT(outcomes_in_group(2, [](const ProcessGroup& group) { (void)group.new_group({group.rank()}); }),
              Each(HasSubstr("equal lists")));
  EXPECT_THAT(outcomes_in_group(2,
                                [](const ProcessGroup& group) {
                                  (void)group.new_group({0, 2});
                                }),
              Each(HasSubstr("different ranks from 0 to 1")));
}

TEST(Wrapping, FailsOnEveryRankWithTheNameOfWhatDiffers) {
  const auto nothing = outcomes_in_group(2, [](const ProcessGroup& group) {
    torch::nn::Linear layer(2, 2);
    if (group.rank() == 1) {
      for (Tensor& parameter : layer->parameters()) parameter.requires_grad_(false);
    }
    DistributedDataParallel model(layer, group);
  });
  EXPECT_THAT(nothing, ElementsAre(HasSubstr("rank 1 could not wrap its module"), HasSubstr("[LS-001]")));
  const auto sizes = outcomes_in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(torch::nn::Linear(2, 2 + group.rank()), group);
  });
  EXPECT_THAT(sizes, Each(AllOf(HasSubstr("'weight'"), HasSubstr("[LS-002]"))));
  const auto caps = outcomes_in_group(2, [](const ProcessGroup& group) {
    DistributedDataParallel model(torch::nn::Linear(2, 2), group, Options{}.bucket_cap_mb(-1));
  });
  EXPECT_THAT(caps, Each(HasSubstr("bucket_cap_mb")));
}

TEST(Wrapping, NamesAModuleThatWasConvertedAndABatchOnTheWrongDevice) {
  on_ranks(1, [](const ProcessGroup& group) {
    torch::nn::Linear layer(2, 2);
    DistributedDataParallel model(layer, group);
    try {
      (void)model.call([](torch::nn::Linear& module, const Tensor& x) { return module(x + x.sum().item<float>()); },
                       torch::ones({1, 2}, torch::kMeta));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("input tensor 0 of forward is on meta"), HasSubstr("[LS-066]")));
    }
    layer->to(torch::kDouble);
    try {
      (void)model(torch::ones({1, 2}, torch::kDouble));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'weight' was Float on cpu"), HasSubstr("is Double on cpu now")));
    }
    torch::nn::Linear frozen(2, 2);
    for (Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    DistributedDataParallel plain(frozen, group, Options{}.allow_passthrough(true));
    EXPECT_EQ(plain(torch::ones({1, 2})).numel(), 2);
  });
}

TEST(Helpers, MeansAreWeightedBySamples) {
  on_ranks(2, [](const ProcessGroup& group) {
    const bool first = group.rank() == 0;
    EXPECT_EQ(mean(group, first ? 1.0 : 2.0, first ? 3 : 1), 1.25);
    EXPECT_EQ(mean(group, first ? 7.0 : std::nan(""), first ? 1 : 0), 7.0);
    WeightedMean metric;
    if (first) metric.add(1.0, 2);
    if (first) metric.add(4.0, 1);
    EXPECT_EQ(metric.reduce(group), 2.0);  // the other rank has seen nothing
    EXPECT_THROW((void)mean(group, 1.0, 0), Error);
    EXPECT_THROW(metric.add(1.0, -1), Error);
  });
}

TEST(Helpers, ClippingScalesTheReducedGradientsTheSameEverywhere) {
  on_ranks(2, [](const ProcessGroup& group) {
    torch::nn::Linear layer(torch::nn::LinearOptions(2, 1).bias(false));
    DistributedDataParallel model(layer, group);
    const Tensor input = group.rank() == 0 ? torch::tensor({{6.0F, 0.0F}}) : torch::tensor({{0.0F, 8.0F}});
    model(input).sum().backward();                    // mean gradient (3, 4)
    EXPECT_NEAR(model.clip_grad_norm(1.0), 5, 1e-6);  // the norm before
    EXPECT_NEAR(layer->weight.grad().norm().item<double>(), 1, 1e-5);
    EXPECT_THROW((void)model.clip_grad_norm(0), Error);
  });
}

TEST(Helpers, TheSamplerSharesTheStepsOfOneProcessOut) {
  const OrderPreservingSampler::Order in_order{.shuffle = false};
  OrderPreservingSampler first(10, 0, 2, in_order), second(10, 1, 2, in_order);
  std::vector<std::vector<size_t>> steps;
  for (int i = 0; i < 3; ++i) {
    steps.push_back(first.next(2).value());
    steps.push_back(second.next(2).value());
  }
  using Part = std::vector<size_t>;
  EXPECT_EQ(steps, (std::vector<Part>{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8}, {9}}));
  EXPECT_FALSE(first.next(2));
  EXPECT_EQ(OrderPreservingSampler(11, 0, 2, in_order).loss_scale(2, 2), 4.0 / 3);
  EXPECT_THROW((void)OrderPreservingSampler(1, 0, 2, in_order).next(2), Error);

  // The order that torch.randperm has in Python for seed 3 and epoch 1, and the same on a copy after set_epoch.
  OrderPreservingSampler shuffled(5, 0, 1, {.seed = 3});
  OrderPreservingSampler copy = shuffled;
  shuffled.set_epoch(1);
  copy.reset();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
  const Tensor order = at::randperm(5, generator, at::TensorOptions(at::kLong));
  const std::vector<size_t> drawn = copy.next(5).value();
  for (int64_t i = 0; i < 5; ++i)
    EXPECT_EQ(static_cast<int64_t>(drawn[static_cast<size_t>(i)]), order[i].item<int64_t>());
}

}  // namespace
}  // namespace lockstep
