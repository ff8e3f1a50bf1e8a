// What depends on the backends of a build: process groups made without Python, and a few questions to CUDA.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace lockstep {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Where gloo listens: network interfaces by name, or else the address of one.
struct GlooPlace {
  std::vector<std::string> interfaces{};
  std::string address{};
};

/// Connects `size` ranks with each other. Collective.
/// @param store    with a prefix that no other group has.
/// @param timeout  for each collective.
/// @throws std::exception  of gloo's kind: an interface does not exist, or a rank could not be reached.
[[nodiscard]] BackendPtr make_gloo_backend(const StorePtr& store, int rank, int size, const GlooPlace& place,
                                           std::chrono::milliseconds timeout);

/// GPUs of this machine that the NCCL of this build could use; 0 in a build without NCCL.
[[nodiscard]] int num_gpus();

/// Makes GPU `index` the calling thread's current one.
[[nodiscard]] at::Device use_gpu(int index);

/// The calling thread may ask for events while another one captures a graph, without spoiling it.
void look_on_during_captures();

/// c10d's NCCL group, on the calling thread's current GPU. Connections are made at the first collective.
/// @throws lockstep::Error  in a build without NCCL.
[[nodiscard]] BackendPtr make_nccl_backend(const StorePtr& store, int rank, int size,
                                           std::chrono::milliseconds timeout);

/// A process group over one backend a type of device; collectives go through torch's dispatcher.
/// @param nccl  null: gloo serves the GPUs too.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const StorePtr& store, int rank, int size,
                                                                        const std::string& name, const BackendPtr& gloo,
                                                                        const BackendPtr& nccl);

}  // namespace lockstep
