// What a step costs on the C++ front, against the loop that programs write by hand and against no reduction at all.
//
//   torchrun --standalone --nproc-per-node 2 --no-python build/release/front/cpp_step --model gpt --rounds 8
//
// Contenders, in turns within each round: "limit", the step with one all-reduce of one element; "loop", backward and
// then an all-reduce of each gradient, divided by the number of ranks; "front" and "front views". A block of steps
// begins at a barrier, and the slowest rank counts. Models: "mlp" is that of gloo_mlp.py, which measures Python's DDP
// on it; "resnet" has 6 and "gpt" 10 million parameters. The last line of rank 0 is JSON: the median over rounds of
// milliseconds a step, and of the percentage over "limit".
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <map>

#include "examples/arguments.h"
#include "lockstep/lockstep.h"

namespace {

using lockstep::ProcessGroup;
using torch::Tensor;
namespace nn = torch::nn;

struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t channels)
      : body(register_module("body",
                             nn::Sequential(nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
                                            nn::BatchNorm2d(channels), nn::ReLU(),
                                            nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
                                            nn::BatchNorm2d(channels)))) {}
  Tensor forward(const Tensor& x) { return torch::relu(x + body->forward(x)); }
  nn::Sequential body;
};
TORCH_MODULE(Residual);

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width)
      : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}
  Tensor forward(const Tensor& x) {
    const int64_t width = x.size(2);
    const auto heads = qkv(norm1(x)).view({x.size(0), x.size(1), 3, width / 64, 64}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    const Tensor y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down(torch::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct Task {
  nn::Sequential net;
  Tensor inputs, targets;
};

Task make_task(const std::string& name, int64_t batch, at::Device device) {
  torch::manual_seed(0);
  Task task;
  const int64_t count = batch > 0 ? batch : (name == "mlp" ? 64 : 4);
  if (name == "mlp") {
    const std::vector<int64_t> widths = {1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024};
    for (size_t i = 1; i < widths.size(); ++i) {
      task.net->push_back(nn::Linear(widths[i - 1], widths[i]));
      if (i + 1 < widths.size()) task.net->push_back(nn::ReLU());
    }
    task.inputs = torch::randn({count, 1024});
    task.targets = torch::randn({count, 1024});
  } else if (name == "resnet") {
    task.net->push_back(nn::Conv2d(nn::Conv2dOptions(3, 128, 3).padding(1).stride(2)));
    for (int i = 0; i < 20; ++i) task.net->push_back(Residual(128));
    task.net->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({1, 1})));
    task.net->push_back(nn::Flatten());
    task.net->push_back(nn::Linear(128, 100));
    task.inputs = torch::randn({count, 3, 32, 32});
    task.targets = torch::randn({count, 100});
  } else if (name == "gpt") {
    for (int i = 0; i < 12; ++i) task.net->push_back(Block(256));
    task.net->push_back(nn::Linear(256, 256));
    task.inputs = torch::randn({count, 128, 256});
    task.targets = torch::randn({count, 128, 256});
  } else {
    throw lockstep::examples::UsageError("--model is mlp, resnet or gpt, not " + name);
  }
  task.net->to(device);
  task.inputs = task.inputs.to(device);
  task.targets = task.targets.to(device);
  return task;
}

/// Forward, backward, reduction and optimizer of one contender.
using Step = std::function<void()>;

Step make_step(const std::string& name, Task task, const ProcessGroup& group) {
  auto optimizer = std::make_shared<torch::optim::SGD>(task.net->parameters(), torch::optim::SGDOptions(1e-3));
  const auto loss = [](const Tensor& output, const Task& on) { return torch::mse_loss(output, on.targets); };
  if (name == "loop" || name == "limit") {
    return [=, &group]() mutable {
      optimizer->zero_grad();
      loss(task.net->forward(task.inputs), task).backward();
      std::vector<Tensor> reduced;
      if (name == "limit") reduced.push_back(torch::zeros({1}, task.inputs.options()));
      if (name == "loop") {
        for (const Tensor& parameter : task.net->parameters()) reduced.push_back(parameter.grad());
      }
      for (Tensor& tensor : reduced) {
        std::vector<Tensor> one{tensor};
        group.c10d()->allreduce(one)->wait();
        tensor.div_(group.size());
      }
      optimizer->step();
    };
  }
  lockstep::DistributedDataParallel model(task.net, group,
                                          lockstep::Options{}.gradient_as_bucket_view(name == "front views"));
  return [=]() mutable {
    optimizer->zero_grad();
    loss(model(task.inputs), task).backward();
    optimizer->step();
  };
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Milliseconds a step of the slowest rank.
double measure(const Step& step, int64_t steps, const ProcessGroup& group) {
  Tensor milliseconds = torch::zeros({1}, torch::kDouble);
  std::vector<Tensor> one{milliseconds};
  group.c10d()->allreduce(one)->wait();  // begin together
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; ++i) step();
  if (!group.device().is_cpu()) torch::cuda::synchronize();
  milliseconds.fill_(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() /
                     static_cast<double>(steps));
  c10d::AllreduceOptions largest;
  largest.reduceOp = c10d::ReduceOp::MAX;
  group.c10d()->allreduce(one, largest)->wait();
  return milliseconds.item<double>();
}

void run(int count, char** values) {
  lockstep::examples::Arguments arguments(count, values);
  const std::string name = arguments.text("model", "gpt");
  const int64_t batch = arguments.whole("batch", 0, 0), rounds = arguments.whole("rounds", 8, 1),
                steps = arguments.whole("steps", 4, 1);
  arguments.finish();
  const ProcessGroup group = lockstep::init_process_group_from_env(lockstep::GroupOptions{}.allow_single(true));
  if (group.device().is_cpu()) torch::set_num_threads(1);

  const std::vector<std::string> contenders = {"limit", "loop", "front", "front views"};
  std::vector<Step> runs;
  for (const std::string& contender : contenders) {
    runs.push_back(make_step(contender, make_task(name, batch, group.device()), group));
    for (int i = 0; i < 3; ++i) runs.back()();
  }
  std::map<std::string, std::vector<double>> times, taxes;
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<double> now;
    for (const Step& step : runs) now.push_back(measure(step, steps, group));
    for (size_t i = 0; i < contenders.size(); ++i) {
      times[contenders[i]].push_back(now[i]);
      taxes[contenders[i]].push_back(100 * (now[i] / now[0] - 1));
    }
  }
  std::string report = fmt::format(R"({{"model": "{}", "ranks": {}, "device": "{}")", name, group.size(),
                                   c10::DeviceTypeName(group.device().type(), true));
  for (const std::string& contender : contenders) {
    lockstep::log0(group, "{:12} {:8.2f} ms a step, {:6.1f} % over the limit", contender, median(times[contender]),
                   median(taxes[contender]));
    report += fmt::format(R"(, "{}": {{"ms": {:.3f}, "over_limit": {:.2f}}})", contender, median(times[contender]),
                          median(taxes[contender]));
  }
  lockstep::print0(group, "{}}}", report);
}

}  // namespace

int main(int count, char** values) {
  try {
    run(count, values);
  } catch (const std::exception& error) {
    std::cerr << "cpp_step: " << error.what() << '\n';
    return 1;
  }
}
