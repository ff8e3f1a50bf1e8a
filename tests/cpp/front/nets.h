// A small net with known weights, batches, and what one process computes for the mean of the ranks' losses.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

namespace lockstep::testing {

using torch::Tensor;

/// Two layers, and a third one beside the second that may be left out.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t inputs = 6)
      : first(register_module("first", torch::nn::Linear(inputs, 8))),
        second(register_module("second", torch::nn::Linear(8, 3))),
        side(register_module("side", torch::nn::Linear(8, 3))) {}
  Tensor forward(const Tensor& x, bool with_side = true) {
    const Tensor hidden = torch::tanh(first(x));
    return with_side ? second(hidden) + side(hidden) : second(hidden);
  }
  torch::nn::Linear first, second, side;
};
TORCH_MODULE(Net);

/// The same weights on every rank, although ranks are threads that share a random generator.
template <typename Module>
Module filled(Module module) {
  const torch::NoGradGuard no_grad;
  double start = 0;
  for (Tensor& parameter : module->parameters()) {
    parameter.copy_(torch::sin(torch::arange(parameter.numel(), torch::kDouble) + start++).view(parameter.sizes()) *
                    0.3);
  }
  return module;
}

inline Tensor batch_of(int rank, int64_t samples = 4, int64_t inputs = 6) {
  return torch::cos(torch::arange(samples * inputs, torch::kDouble) * 0.7 + rank * 11)
      .view({samples, inputs})
      .to(torch::kFloat);
}

inline std::vector<Tensor> gradients(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> all;
  for (const Tensor& parameter : parameters)
    all.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  return all;
}

/// What one process computes for the mean of the ranks' losses.
inline std::vector<Tensor> expected(int world, const std::function<Tensor(Net&, int)>& loss) {
  Net net = filled(Net());
  for (int rank = 0; rank < world; ++rank) (loss(net, rank) / world).backward();
  return gradients(net->parameters());
}

inline void expect_near(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted, double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined()) << i;
    if (!got[i].defined()) continue;
    EXPECT_LE((got[i] - wanted[i]).abs().max().item<double>(), tolerance) << i;
  }
}

inline Tensor loss_of(const Tensor& output) { return output.square().mean(); }

}  // namespace lockstep::testing
