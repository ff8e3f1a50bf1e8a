// A build without CUDA.
#include <stdexcept>

#include "cpp_data_parallel.h"

namespace lockstep::benchmarks {

bool has_data_parallel() { return false; }

torch::Tensor data_parallel(torch::nn::Sequential& /*net*/, const torch::Tensor& /*inputs*/, int /*gpus*/) {
  throw std::runtime_error("torch::nn::parallel::data_parallel needs GPUs and a lockstep built for them");
}

}  // namespace lockstep::benchmarks
