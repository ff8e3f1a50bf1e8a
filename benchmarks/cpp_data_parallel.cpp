#include "cpp_data_parallel.h"

#include <torch/nn/parallel/data_parallel.h>

namespace lockstep::benchmarks {

bool has_data_parallel() { return torch::cuda::device_count() > 1; }

torch::Tensor data_parallel(torch::nn::Sequential& net, const torch::Tensor& inputs, int gpus) {
  std::vector<torch::Device> devices;
  for (int i = 0; i < gpus; ++i) devices.emplace_back(torch::kCUDA, static_cast<torch::DeviceIndex>(i));
  return torch::nn::parallel::data_parallel(net, inputs, devices);
}

}  // namespace lockstep::benchmarks
