// What a step costs on the C++ front, against the loop that programs write by hand and against no reduction at all.
//
//   torchrun --standalone --nproc-per-node 2 --no-python build/release/front/cpp_step --model gpt --rounds 8
//
// cpp_step.py runs it in turns with torch's DDP in Python on the same models. Contenders, in turns within each round:
// "limit", the step with one all-reduce of one element; "loop", backward and then an all-reduce of each gradient,
// divided by the number of ranks; "front" and "front views". A block of steps begins at a barrier, and the slowest rank
// counts. Models: "mlp" is that of gloo_mlp.py, which measures Python's DDP on it; "resnet" has 6 and "gpt" 10 million
// parameters, by default. The last line of rank 0 is JSON: the median over rounds of milliseconds a step, and of the
// percentage over "limit".
//
// With --turns a round begins when rank 0 reads a line from standard input, and ends with a line of JSON on standard
// output: milliseconds a step by contender.
#include <torch/torch.h>

#include <iostream>
#include <map>

#include "cpp_models.h"

namespace {

using lockstep::ProcessGroup;
using torch::Tensor;
using namespace lockstep::benchmarks;

/// Forward, backward, reduction and optimizer of one contender.
using Step = std::function<void()>;

const std::vector<std::string> kContenders = {"limit", "loop", "front", "front views"};

Task make_task(const std::string& name, const Sizes& sizes, at::Device device) {
  torch::manual_seed(0);
  if (name == "mlp") return mlp(sizes, device);
  if (name == "resnet") return resnet(sizes, 20, device);
  if (name == "gpt") return gpt(sizes, device);
  throw lockstep::examples::UsageError("--model is mlp, resnet or gpt, not " + name);
}

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

/// Whether another round is wanted: on every rank what rank 0 read. Collective.
bool asked_for_another(const ProcessGroup& group) {
  std::string line;
  Tensor wanted = torch::tensor({group.rank() == 0 && std::getline(std::cin, line) ? 1 : 0});
  std::vector<Tensor> one{wanted};
  group.c10d()->allreduce(one)->wait();
  return wanted.item<int>() != 0;
}

void run(int count, char** values) {
  lockstep::examples::Arguments arguments(count, values);
  const std::string name = arguments.text("model", "gpt");
  const Sizes sizes{.batch = arguments.whole("batch", 0, 0),
                    .width = arguments.whole("width", 0, 0),
                    .size = arguments.whole("size", 0, 0)};
  const int64_t rounds = arguments.whole("rounds", 8, 1), steps = arguments.whole("steps", 4, 1);
  const bool turns = arguments.flag("turns");
  arguments.finish();
  const ProcessGroup group = lockstep::init_process_group_from_env(lockstep::GroupOptions{}.allow_single(true));
  if (group.device().is_cpu()) torch::set_num_threads(1);

  std::vector<Step> runs;
  for (const std::string& contender : kContenders) {
    runs.push_back(make_step(contender, make_task(name, sizes, group.device()), group));
    for (int i = 0; i < 3; ++i) runs.back()();
  }
  std::map<std::string, std::vector<double>> times, taxes;
  for (int64_t round = 0; turns ? asked_for_another(group) : round < rounds; ++round) {
    std::string line;
    for (size_t i = 0; i < kContenders.size(); ++i) {
      const std::string& contender = kContenders[i];
      times[contender].push_back(time_steps_together(runs[i], steps, group));
      taxes[contender].push_back(100 * (times[contender].back() / times["limit"].back() - 1));
      line += fmt::format(R"({}"{}": {:.4f})", i == 0 ? "" : ", ", contender, times[contender].back());
    }
    if (turns) lockstep::print0(group, "{{{}}}", line);
  }
  if (turns) return;
  std::string report = fmt::format(R"({{"model": "{}", "ranks": {}, "device": "{}")", name, group.size(),
                                   c10::DeviceTypeName(group.device().type(), true));
  for (const std::string& contender : kContenders) {
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
