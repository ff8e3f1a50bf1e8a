#include "comm/own_communicator.h"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <numeric>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "comm/c10d_communicator.h"
#include "comm/store_prefix.h"
#include "core/error.h"

namespace lockstep {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::string next_prefix(c10d::ProcessGroup& group) {
  return next_store_prefix("lockstep/own", group.getGroupName(), group.getRank());
}

/// A second gloo group with the same ranks and options. Null for a wrapper around the backend, such as torch's for
/// debugging: it cannot be split, and is to see every collective.
std::shared_ptr<Communicator> split_gloo(const Group& group) {
  std::vector<int> all(static_cast<size_t>(group->getSize()));
  std::iota(all.begin(), all.end(), 0);
  const std::string prefix = next_prefix(*group);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, group->getStore());
  c10::intrusive_ptr<c10d::Backend> own;
  try {
    const auto backend = group->getDefaultBackend();
    own = backend->split(store, all, backend->getBackendOptions());
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find("implement") == text.npos) throw;  // it has no `split`, or no options to hand to it
    return nullptr;
  }
  auto result = c10::make_intrusive<c10d::ProcessGroup>(store, group->getRank(), group->getSize());
  for (const auto device : group->getDeviceTypes()) {
    result->setBackend(device.type(), c10d::ProcessGroup::BackendType::GLOO, own);
  }
  result->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  result->setGroupName(group->getGroupName() + "/" + prefix);
  return std::make_shared<C10dCommunicator>(std::move(result));
}

std::shared_ptr<Communicator> join_nccl(const Group& group, at::Device device, NcclOptions options) {
  if (!device.is_cuda()) {
    fail(Code::kNcclNotJoined,
         "[rank {}] communicator='nccl' needs a model on a GPU, but its parameters are on '{}'. Move the model first, "
         "or leave the choice to lockstep (communicator='auto').",
         group->getRank(), device.str());
  }
  const c10::DeviceGuard guard(device);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(next_prefix(*group), group->getStore());
  options.timeout = C10dCommunicator(group).timeout();
  return make_nccl_communicator(store, group->getRank(), group->getSize(), options);
}

}  // namespace

CommunicatorKind communicator_kind(const std::string& name) {
  if (name == "auto") return CommunicatorKind::kAuto;
  if (name == "group") return CommunicatorKind::kGroup;
  if (name == "nccl") return CommunicatorKind::kNccl;
  throw std::invalid_argument(fmt::format("communicator must be 'auto', 'group' or 'nccl', but is '{}'.", name));
}

std::shared_ptr<Communicator> make_own_communicator(const Group& group, CommunicatorKind kind, at::Device device,
                                                    NcclOptions nccl) {
  if (group->getSize() == 1 || kind == CommunicatorKind::kGroup || !group->getStore()) return nullptr;
  if (kind == CommunicatorKind::kNccl) return join_nccl(group, device, std::move(nccl));
  return group->getBackendName() == "gloo" ? split_gloo(group) : nullptr;
}

}  // namespace lockstep
