// c10d's NCCL backend.
#define USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backends.h"

namespace lockstep {

int num_gpus() { return c10::cuda::device_count(); }

at::Device use_gpu(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

void look_on_during_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

BackendPtr make_nccl_backend(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->global_ranks_in_group.resize(static_cast<size_t>(size));  // as for gloo
  std::iota(options->global_ranks_in_group.begin(), options->global_ranks_in_group.end(), uint64_t{0});
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

}  // namespace lockstep
