// CUDA graphs: whether what is launched now is recorded instead of run.
#pragma once

#include <c10/core/Device.h>

namespace lockstep::cuda {

/// The current stream of `device` is being captured into a graph: nothing can be read from it, and host code runs once
/// for many replays. False on the CPU.
[[nodiscard]] bool is_capturing(at::Device device);

}  // namespace lockstep::cuda
