// c10d's gloo backend, compiled against the declarations in gloo_headers/.
#define USE_C10D_GLOO
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends.h"

namespace lockstep {

BackendPtr make_gloo_backend(const StorePtr& store, int rank, int size, const GlooPlace& place,
                             std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(timeout);
  for (const std::string& name : place.interfaces) options->devices.push_back(Gloo::createDeviceForInterface(name));
  if (place.interfaces.empty()) {
    options->devices.push_back(place.address.empty() ? Gloo::createDefaultDevice()
                                                     : Gloo::createDeviceForHostname(place.address));
  }
  // Left empty, torch takes the ranks of the first group of this process for those of all, and `split` goes astray.
  options->global_ranks_in_group.resize(static_cast<size_t>(size));
  std::iota(options->global_ranks_in_group.begin(), options->global_ranks_in_group.end(), uint64_t{0});
  options->threads = static_cast<int>(options->devices.size()) * 2;
  return c10::make_intrusive<Gloo>(store, rank, size, options);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const StorePtr& store, int rank, int size,
                                                          const std::string& name, const BackendPtr& gloo,
                                                          const BackendPtr& nccl) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(at::kCPU, Type::GLOO, gloo);
  group->setBackend(at::kCUDA, nccl ? Type::NCCL : Type::GLOO, nccl ? nccl : gloo);
  group->setDefaultBackend(nccl ? Type::NCCL : Type::GLOO);
  group->setGroupName(name);
  return group;
}

}  // namespace lockstep
