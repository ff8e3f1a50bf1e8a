// torch::nn::parallel::data_parallel, which only a torch with CUDA has.
#pragma once

#include <torch/torch.h>

namespace lockstep::benchmarks {

/// Whether `data_parallel` works here.
[[nodiscard]] bool has_data_parallel();

/// Splits `inputs` over the first `gpus` GPUs, runs a replica of `net` on each, and gathers the outputs on the first.
[[nodiscard]] torch::Tensor data_parallel(torch::nn::Sequential& net, const torch::Tensor& inputs, int gpus);

}  // namespace lockstep::benchmarks
