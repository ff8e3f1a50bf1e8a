// The models of the benchmarks in C++, and how they are timed. cpp_step.py has the same models in Python.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "examples/arguments.h"
#include "lockstep/lockstep.h"

namespace lockstep::benchmarks {

namespace nn = torch::nn;
using torch::Tensor;

/// Cloneable, for torch::nn::parallel::data_parallel.
struct ResidualImpl : nn::Cloneable<ResidualImpl> {
  explicit ResidualImpl(int64_t channels) : channels_(channels) { reset(); }
  void reset() override {
    const auto convolution = [this] {
      return nn::Conv2d(nn::Conv2dOptions(channels_, channels_, 3).padding(1).bias(false));
    };
    body = register_module("body", nn::Sequential(convolution(), nn::BatchNorm2d(channels_), nn::ReLU(), convolution(),
                                                  nn::BatchNorm2d(channels_)));
  }
  Tensor forward(const Tensor& x) { return torch::relu(x + body->forward(x)); }
  int64_t channels_;
  nn::Sequential body{nullptr};
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

/// 0 stands for the default of the model.
struct Sizes {
  int64_t batch = 0;  ///< Samples of one rank.
  int64_t width = 0;  ///< Channels of "resnet", width of "gpt" (a multiple of 64).
  int64_t size = 0;   ///< Side of the images of "resnet", tokens of "gpt".
};

struct Task {
  nn::Sequential net;
  Tensor inputs, targets;
};

inline int64_t or_else(int64_t given, int64_t otherwise) { return given > 0 ? given : otherwise; }

/// `depth` residual blocks on images of half the side.
inline Task resnet(const Sizes& sizes, int64_t depth, at::Device device) {
  const int64_t batch = or_else(sizes.batch, 4), width = or_else(sizes.width, 128), side = or_else(sizes.size, 32);
  Task task;
  task.net->push_back(nn::Conv2d(nn::Conv2dOptions(3, width, 3).padding(1).stride(2)));
  for (int64_t i = 0; i < depth; ++i) task.net->push_back(Residual(width));
  task.net->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({1, 1})));
  task.net->push_back(nn::Flatten());
  task.net->push_back(nn::Linear(width, 100));
  task.net->to(device);
  task.inputs = torch::randn({batch, 3, side, side}, device);
  task.targets = torch::randn({batch, 100}, device);
  return task;
}

inline Task gpt(const Sizes& sizes, at::Device device) {
  const int64_t batch = or_else(sizes.batch, 4), width = or_else(sizes.width, 256), tokens = or_else(sizes.size, 128);
  if (width % 64 != 0) throw examples::UsageError("--width of gpt is a multiple of 64");
  Task task;
  for (int i = 0; i < 12; ++i) task.net->push_back(Block(width));
  task.net->push_back(nn::Linear(width, 256));
  task.net->to(device);
  task.inputs = torch::randn({batch, tokens, width}, device);
  task.targets = torch::randn({batch, tokens, 256}, device);
  return task;
}

/// That of gloo_mlp.py.
inline Task mlp(const Sizes& sizes, at::Device device) {
  const int64_t batch = or_else(sizes.batch, 64);
  Task task;
  const std::vector<int64_t> widths = {1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024};
  for (size_t i = 1; i < widths.size(); ++i) {
    task.net->push_back(nn::Linear(widths[i - 1], widths[i]));
    if (i + 1 < widths.size()) task.net->push_back(nn::ReLU());
  }
  task.net->to(device);
  task.inputs = torch::randn({batch, 1024}, device);
  task.targets = torch::randn({batch, 1024}, device);
  return task;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Milliseconds of one of `steps` calls, on this rank.
inline double time_steps(const std::function<void()>& step, int64_t steps, at::Device device) {
  const auto synchronize = [&] {
    if (!device.is_cpu()) torch::cuda::synchronize(device.index());
  };
  synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; ++i) step();
  synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() /
         static_cast<double>(steps);
}

/// The same of the slowest rank; all begin together. Collective.
inline double time_steps_together(const std::function<void()>& step, int64_t steps, const ProcessGroup& group) {
  Tensor milliseconds = torch::zeros({1}, torch::kDouble);
  std::vector<Tensor> one{milliseconds};
  group.c10d()->allreduce(one)->wait();
  milliseconds.fill_(time_steps(step, steps, group.device()));
  c10d::AllreduceOptions largest;
  largest.reduceOp = c10d::ReduceOp::MAX;
  group.c10d()->allreduce(one, largest)->wait();
  return milliseconds.item<double>();
}

}  // namespace lockstep::benchmarks
