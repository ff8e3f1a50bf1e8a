// Images per second of a ResNet-like net that is bound by computing: on one GPU, on all of this machine with
// torch::nn::parallel::data_parallel, and with lockstep (field case 97,
// https://github.com/pytorch/pytorch/issues/40581).
//
//   torchrun --standalone --nproc-per-node 2 --no-python build/gpu/front/cpp_images --batch 128 --width 256
//
// Contenders in turns within each round: "one", rank 0 alone with one batch while the others wait; "data_parallel",
// rank 0 alone with a batch for each GPU; "front", all ranks with a batch each, the slowest counts. The last line of
// rank 0 is JSON: medians over rounds of images per second, and of the factor over "one". On CPUs, with gloo, the
// second is left out. Each step is forward, backward and SGD.
#include <torch/torch.h>

#include <iostream>
#include <map>

#include "cpp_data_parallel.h"
#include "cpp_models.h"

namespace {

using lockstep::ProcessGroup;
using torch::Tensor;
using namespace lockstep::benchmarks;

/// One step, and how many images it takes over all ranks.
struct Contender {
  std::string name;
  bool alone = false;  // only rank 0 runs it
  std::function<void()> step{};
  int64_t images = 0;
};

template <typename Forward>
std::function<void()> make_step(const Task& task, Forward forward) {
  auto optimizer = std::make_shared<torch::optim::SGD>(task.net->parameters(), torch::optim::SGDOptions(1e-3));
  return [=]() mutable {
    optimizer->zero_grad();
    torch::mse_loss(forward(task.inputs), task.targets).backward();
    optimizer->step();
  };
}

std::vector<Contender> make_contenders(const Sizes& sizes, int64_t depth, const ProcessGroup& group) {
  const auto task = [&](int64_t ranks) {
    torch::manual_seed(0);
    Sizes scaled = sizes;
    scaled.batch *= ranks;
    return resnet(scaled, depth, group.device());
  };
  std::vector<Contender> contenders;
  const Task one = task(1);
  contenders.push_back(
      {"one", true, make_step(one, [net = one.net](const Tensor& x) mutable { return net->forward(x); }), sizes.batch});
  if (has_data_parallel() && group.backend() == "nccl") {
    const int gpus = group.size();
    const Task split = task(gpus);
    contenders.push_back(
        {"data_parallel", true,
         make_step(split, [net = split.net, gpus](const Tensor& x) mutable { return data_parallel(net, x, gpus); }),
         sizes.batch * gpus});
  }
  const Task ours = task(1);
  lockstep::DistributedDataParallel model(ours.net, group, lockstep::Options{}.gradient_as_bucket_view(true));
  contenders.push_back({"front", false, make_step(ours, [model](const Tensor& x) mutable { return model(x); }),
                        sizes.batch * group.size()});
  return contenders;
}

/// Images per second over all ranks. Collective.
double measure(const Contender& contender, int64_t steps, const ProcessGroup& group) {
  double milliseconds = 0;
  if (!contender.alone) {
    milliseconds = time_steps_together(contender.step, steps, group);
  } else if (group.rank() == 0) {
    milliseconds = time_steps(contender.step, steps, group.device());
  }
  group.barrier();  // through the store: it occupies no GPU
  return milliseconds > 0 ? 1000 * static_cast<double>(contender.images) / milliseconds : 0;
}

void run(int count, char** values) {
  lockstep::examples::Arguments arguments(count, values);
  const Sizes sizes{.batch = arguments.whole("batch", 64, 1),
                    .width = arguments.whole("width", 128, 1),
                    .size = arguments.whole("size", 32, 8)};
  const int64_t depth = arguments.whole("depth", 20, 1), rounds = arguments.whole("rounds", 10, 1),
                steps = arguments.whole("steps", 4, 1);
  arguments.finish();
  const ProcessGroup group = lockstep::init_process_group_from_env(lockstep::GroupOptions{}.allow_single(true));
  // data_parallel drives each GPU from a thread of this pool; torchrun allows one thread by default.
  torch::set_num_threads(group.device().is_cpu() ? 1 : group.size());

  const std::vector<Contender> contenders = make_contenders(sizes, depth, group);
  for (const Contender& contender : contenders) (void)measure(contender, 3, group);
  std::map<std::string, std::vector<double>> speeds, factors;
  for (int64_t round = 0; round < rounds; ++round) {
    for (const Contender& contender : contenders) {
      speeds[contender.name].push_back(measure(contender, steps, group));
      factors[contender.name].push_back(speeds[contender.name].back() / speeds["one"].back());
    }
  }
  std::string report = fmt::format(
      R"({{"ranks": {}, "device": "{}", "batch": {}, "width": {}, "side": {}, "depth": {}, "rounds": {})", group.size(),
      c10::DeviceTypeName(group.device().type(), true), sizes.batch, sizes.width, sizes.size, depth, rounds);
  for (const std::string name : {"one", "data_parallel", "front"}) {
    if (!speeds.contains(name)) {
      report += fmt::format(R"(, "{}": null)", name);
      continue;
    }
    lockstep::log0(group, "{:14} {:9.1f} images/s, {:5.2f} times one", name, median(speeds[name]),
                   median(factors[name]));
    report += fmt::format(R"(, "{}": {{"images_per_second": {:.2f}, "factor": {:.3f}}})", name, median(speeds[name]),
                          median(factors[name]));
  }
  lockstep::print0(group, "{}}}", report);
}

}  // namespace

int main(int count, char** values) {
  try {
    run(count, values);
  } catch (const std::exception& error) {
    std::cerr << "cpp_images: " << error.what() << '\n';
    return 1;
  }
}
