// The wrapper for torch::nn modules: what its gradients are in every mode, with every hook.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "nets.h"
#include "threads.h"

namespace lockstep {
namespace {

using testing::batch_of;
using testing::expect_near;
using testing::expected;
using testing::filled;
using testing::gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::on_ranks;
using torch::Tensor;

TEST(CppFront, EveryOptionGivesTheMeanOverRanks) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  const std::vector<Options> all = {
      Options{},
      Options{}.gradient_as_bucket_view(true),
      Options{}.static_graph(true),
      Options{}.find_unused_parameters(true).skip_all_reduce_unused_params(true),
      Options{}.bucket_cap_mb(1e-4).lazy_bucket_allocation(true),
      Options{}.bucket_cap_mb_list({1e-4, 1.0}).guards(false),
      Options{}.communicator(CommunicatorKind::kGroup).stall_threshold(std::chrono::milliseconds(0)),
      Options{}.strict(true).check_sync_every(2).uneven_forwards(true),
      Options{}.init_sync(false).broadcast_buffers(false),
  };
  on_ranks(2, [&](const ProcessGroup& group) {
    for (const Options& options : all) {
      DistributedDataParallel model(filled(Net()), group, options);
      for (int step = 0; step < 3; ++step) {  // the bucket plan changes after the first
        model.zero_grad(step != 1);
        loss_of(model(batch_of(group.rank()))).backward();
        expect_near(gradients(model.parameters()), wanted, 1e-6);
      }
    }
  });
}

TEST(CppFront, StartsFromTheModelOfRankZero) {
  on_ranks(2, [](const ProcessGroup& group) {
    torch::nn::BatchNorm1d norm(6);
    {
      const torch::NoGradGuard no_grad;
      norm->weight.fill_(group.rank() + 1);
      norm->running_mean.fill_(group.rank() + 5);
    }
    DistributedDataParallel model(norm, group);
    EXPECT_EQ(norm->weight[0].item<double>(), 1);
    EXPECT_EQ(norm->running_mean[0].item<double>(), 5);
    // Two forwards before backward: the buffers that the first one may still need are left alone.
    const Tensor outputs = model(batch_of(group.rank())) + model(batch_of(group.rank() + 2));
    outputs.square().mean().backward();
    (void)model(batch_of(0));
    model.assert_in_sync();  // and then those of rank 0 are taken over
  });
}

TEST(CppFront, NoSyncAccumulatesAndTheNextBackwardReducesAll) {
  const auto wanted = expected(2, [](Net& net, int rank) {
    return loss_of(net(batch_of(rank))) + loss_of(net(batch_of(rank + 2))) + loss_of(net(batch_of(rank + 4)));
  });
  on_ranks(2, [&](const ProcessGroup& group) {
    DistributedDataParallel model(filled(Net()), group, Options{}.gradient_as_bucket_view(true));
    const auto backward = [&](int batch) { loss_of(model->forward(batch_of(group.rank() + batch))).backward(); };
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      {
        const auto local = model.no_sync();
        backward(0);
        backward(2);
        EXPECT_THROW((void)model.clip_grad_norm(1.0), Error);
      }
      backward(4);
      expect_near(gradients(model.parameters()), wanted, 1e-6);
    }
    model.zero_grad();
    {
      const auto local = model.no_sync();
      for (const int batch : {0, 2, 4}) backward(batch);
    }
    model.sync_gradients();
    expect_near(gradients(model.parameters()), wanted, 1e-6);
  });
}

TEST(CppFront, UnusedParametersKeepNoGradientAndUsedOnesGetTheMean) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank), rank == 1)); });
  on_ranks(2, [&](const ProcessGroup& group) {
    DistributedDataParallel model(filled(Net()), group, Options{}.find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model.expect_unused({"side"});  // wrong on rank 1: costs time, not correctness
      loss_of(model(batch_of(group.rank()), group.rank() == 1)).backward();
      expect_near(gradients(model.parameters()), wanted, 1e-6);
    }
    model.zero_grad();
    loss_of(model(batch_of(group.rank()), false)).backward();
    EXPECT_FALSE(model.module()->side->weight.grad().defined());
    EXPECT_THROW(model.expect_unused({"sid"}), Error);
  });
}

TEST(CppFront, EveryHookComesNearTheMeanAndIsEqualOnAllRanks) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  const std::map<std::string, double> tolerances = {{"allreduce", 1e-6}, {"fp16", 1e-3},   {"bf16", 1e-2},
                                                    {"int8", 2e-2},      {"power_sgd", 1}, {"batched_power_sgd", 1}};
  on_ranks(2, [&](const ProcessGroup& group) {
    for (const HookEntry& row : comm_hooks()) {
      DistributedDataParallel model(filled(Net()), group);
      model.register_comm_hook(std::string(row.name));
      loss_of(model(batch_of(group.rank()))).backward();
      expect_near(gradients(model.parameters()), wanted, tolerances.at(std::string(row.name)));
      for (Tensor& gradient : gradients(model.parameters())) {
        const Tensor mean_gradient = mean(group, gradient);
        EXPECT_TRUE(at::equal(mean_gradient, gradient.to(torch::kDouble))) << row.name;
      }
    }
    DistributedDataParallel model(filled(Net()), group);
    model.register_comm_hook("power_sgd", {{"rank", int64_t{1}}, {"start_iteration", int64_t{2}}});
    EXPECT_THROW(model.register_comm_hook("power_sgd", {{"runk", int64_t{1}}}), Error);
    int calls = 0;
    model.register_comm_hook("doubled", [&calls](const GradBucket& bucket, Communicator& comm) {
      ++calls;
      std::shared_ptr<Transfer> transfer = comm.average(bucket.memory);
      return [transfer, mean = bucket.memory]() mutable {
        transfer->wait();
        return mean.mul_(2);
      };
    });
    loss_of(model(batch_of(group.rank()))).backward();
    std::vector<Tensor> doubled;
    for (const Tensor& gradient : wanted) doubled.push_back(gradient * 2);
    expect_near(gradients(model.parameters()), doubled, 1e-6);
    EXPECT_GE(calls, 1);
  });
}

TEST(CppFront, ExceptionsInForwardAndBackwardLeaveAModelThatTrainsOn) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  on_ranks(2, [&](const ProcessGroup& group) {
    DistributedDataParallel model(filled(Net()), group);
    EXPECT_THROW((void)model(batch_of(0, 4, 5)), c10::Error);
    const auto hook = model.module()->first->weight.register_hook(
        [](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
    EXPECT_THROW(loss_of(model(batch_of(group.rank()))).backward(), std::exception);
    model.module()->first->weight.remove_hook(hook);
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      loss_of(model(batch_of(group.rank()))).backward();
    }
    expect_near(gradients(model.parameters()), wanted, 1e-6);
  });
}

TEST(CppFront, BackwardAfterTheWrapperIsGoneStaysLocal) {
  on_ranks(2, [](const ProcessGroup& group) {
    Net net = filled(Net());
    Tensor loss;
    {
      DistributedDataParallel model(net, group);
      loss = loss_of(model(batch_of(group.rank())));
    }
    loss.backward();
    Net alone = filled(Net());
    loss_of(alone(batch_of(group.rank()))).backward();
    expect_near(gradients(net->parameters()), gradients(alone->parameters()), 1e-7);
  });
}

TEST(CppFront, SharedFrozenAndHalfPrecisionParameters) {
  on_ranks(2, [](const ProcessGroup& group) {
    torch::nn::Linear shared(6, 6);
    shared->to(torch::kBFloat16);
    torch::nn::Linear frozen(6, 6);
    frozen->to(torch::kBFloat16);
    for (Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    torch::nn::Sequential net(shared, frozen, shared);
    DistributedDataParallel model(net, group);
    EXPECT_EQ(model.parameters().size(), 4);  // the shared layer counts once
    loss_of(model(batch_of(group.rank()).to(torch::kBFloat16))).backward();
    EXPECT_EQ(shared->weight.grad().scalar_type(), torch::kBFloat16);
    EXPECT_FALSE(frozen->weight.grad().defined());
    EXPECT_TRUE(at::equal(mean(group, shared->weight.grad()), shared->weight.grad().to(torch::kDouble)));
    frozen->weight.requires_grad_(true);
    EXPECT_THROW((void)model(batch_of(0).to(torch::kBFloat16)), Error);
  });
}

TEST(CppFront, OneAndTwoRanksTrainAlike) {
  const auto train = [](const ProcessGroup& group, std::vector<Tensor>& result) {
    DistributedDataParallel model(filled(Net()), group);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      const Tensor whole = batch_of(step, 8);
      optimizer.zero_grad();
      loss_of(model(whole.chunk(group.size())[static_cast<size_t>(group.rank())])).backward();
      optimizer.step();
    }
    if (group.rank() == 0) {
      for (const Tensor& parameter : model.parameters()) result.push_back(parameter.detach());
    }
  };
  std::vector<Tensor> alone, together;
  on_ranks(1, [&](const ProcessGroup& group) { train(group, alone); });
  on_ranks(2, [&](const ProcessGroup& group) { train(group, together); });
  expect_near(together, alone, 1e-6);
}

struct Detections {
  Tensor boxes, scores;
};
auto lockstep_tensors(const Detections& found) { return std::tie(found.boxes, found.scores); }

/// One layer an output, in containers of every kind.
struct ManyOutputsImpl : torch::nn::Module {
  ManyOutputsImpl() {
    for (int i = 0; i < 5; ++i) layers->push_back(torch::nn::Linear(6, 2));
    register_module("layers", layers);
  }
  auto forward(const Tensor& x) {
    const auto out = [&](size_t i) { return layers->at<torch::nn::LinearImpl>(i).forward(x); };
    return std::make_tuple(std::vector<Tensor>{out(0)}, std::map<std::string, Tensor>{{"a", out(1)}},
                           std::optional<Tensor>(out(2)), Detections{out(3), out(4)}, std::string("no tensor"));
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(ManyOutputs);

TEST(CppFront, FindsTensorsInTuplesVectorsMapsAndStructs) {
  on_ranks(2, [](const ProcessGroup& group) {
    // Static: only what is reached through an output of forward ends the pass.
    DistributedDataParallel model(filled(ManyOutputs()), group, Options{}.static_graph(true));
    const auto outputs = model(batch_of(group.rank()));
    EXPECT_EQ(tensors_in(outputs).size(), 5);
    Tensor loss = torch::zeros({});
    for (const Tensor& output : tensors_in(outputs)) loss = loss + loss_of(output);
    loss.backward();
    for (const Tensor& gradient : gradients(model.parameters())) {
      EXPECT_TRUE(at::equal(mean(group, gradient), gradient.to(torch::kDouble)));
    }
  });
  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("x", torch::ones(1));
  EXPECT_EQ(tensors_in(dict).size(), 1);
  EXPECT_EQ(tensors_in(c10::IValue(std::vector<Tensor>{torch::ones(1), torch::ones(2)})).size(), 2);
}

TEST(CppFront, SavesAndLoadsWhatTheModuleItselfWould) {
  const auto wanted = expected(2, [](Net& net, int rank) { return loss_of(net(batch_of(rank))); });
  on_ranks(2, [&](const ProcessGroup& group) {
    DistributedDataParallel model(filled(Net()), group);
    std::stringstream file;
    torch::save(model, file);
    Net plain;
    torch::load(plain, file);
    EXPECT_TRUE(at::equal(plain->second->weight, model.module()->second->weight));
    std::stringstream of_plain;
    torch::save(plain, of_plain);
    for (const bool through_wrapper : {true, false}) {
      DistributedDataParallel other(Net(), group, Options{}.strict(true));
      const std::string bytes = of_plain.str();
      for (int step = 0; step < 2; ++step) {
        other.zero_grad();
        loss_of(other(batch_of(group.rank() + 5))).backward();
        other.zero_grad();
        std::stringstream copy(bytes);
        if (through_wrapper) {
          torch::load(other, copy);
        } else {
          Net net = other.module();
          torch::load(net, copy);
        }
        EXPECT_TRUE(at::equal(other.module()->first->weight, plain->first->weight));
        loss_of(other(batch_of(group.rank()))).backward();
        expect_near(gradients(other.parameters()), wanted, 1e-6);  // reduced also after parameters were loaded
      }
    }
    DistributedDataParallel wider(Net(7), group);
    torch::load(wider, of_plain);
    try {
      (void)wider(batch_of(group.rank()));
      ADD_FAILURE() << "another shape went unnoticed";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("'first.weight' had the shape [8, 7] when the module was wrapped and has [8, 6]"));
    }
  });
}

TEST(CppFront, WrapsTorchScript) {
  on_ranks(2, [](const ProcessGroup& group) {
    torch::jit::Module script("Scale");
    script.register_parameter("weight", torch::full({3}, 2.0).requires_grad_(), /*is_buffer=*/false);
    script.define("def forward(self, x):\n    return {'out': x * self.weight}\n");
    DistributedDataParallel model(script, group, Options{}.static_graph(true));
    const c10::IValue output = model(torch::full({3}, group.rank() + 1.0));
    output.toGenericDict().at("out").toTensor().sum().backward();
    EXPECT_EQ(model.parameters().front().grad()[0].item<double>(), 1.5);  // the mean of 1 and 2
  });
}

}  // namespace
}  // namespace lockstep
