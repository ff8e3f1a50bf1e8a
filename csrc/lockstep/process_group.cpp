#include "lockstep/process_group.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <net/if.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <set>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends.h"
#include "core/error.h"
#include "lockstep/connections.h"
#include "lockstep/meeting.h"
#include "lockstep/rendezvous.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kFarewell{10};
/// The rank that serves the store gives up later than the others, which could not find out who is missing without it.
constexpr std::chrono::seconds kServerGrace{2};

c10::intrusive_ptr<c10d::Store> with_prefix(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t start = 0; start < list.size();) {
    const size_t end = std::min(list.find(',', start), list.size());
    if (end > start) parts.push_back(list.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

GlooPlace gloo_place(const Launch& launch, const GroupOptions& options) {
  std::string names = options.interface();
  if (names.empty()) names = process_environment()("GLOO_SOCKET_IFNAME").value_or("");
  if (names.empty() && launch.master_addr.empty()) return {.address = "127.0.0.1"};  // one process
  if (names.empty()) return {.address = local_address_towards(launch.master_addr, launch.master_port)};
  GlooPlace place{.interfaces = split(names)};
  for (const std::string& name : place.interfaces) {
    if (if_nametoindex(name.c_str()) != 0) continue;
    fail(Code::kBackend,
         "[rank {}] this machine has no network interface '{}'. Look at the output of `ip link` for its name, and set "
         "GLOO_SOCKET_IFNAME, or unset it.",
         launch.rank, name);
  }
  return place;
}

std::string chosen_backend(const Launch& launch, const GroupOptions& options) {
  const int gpus = num_gpus();
  const int wanted = launch.local_world_size.value_or(launch.local_rank.value_or(0) + 1);
  if (options.backend().empty()) return gpus >= wanted ? "nccl" : "gloo";
  if (options.backend() != "gloo" && options.backend() != "nccl") {
    fail(Code::kBackend, "[rank {}] there is no backend '{}': choose 'gloo', 'nccl', or none.", launch.rank,
         options.backend());
  }
  if (options.backend() == "gloo") return "gloo";
  if (!launch.local_rank) {
    fail(Code::kLaunch, "[rank {}] NCCL needs the environment variable LOCAL_RANK, the number of this rank's GPU.",
         launch.rank);
  }
  if (gpus <= *launch.local_rank) {
    fail(Code::kBackend,
         "[rank {}] NCCL was asked for, but local rank {} has no GPU of its own: {} are usable here (none also in a "
         "build of lockstep without CUDA). Start fewer processes on this machine, or choose the backend 'gloo'.",
         launch.rank, *launch.local_rank, gpus);
  }
  return "nccl";
}

/// What ranks must have in common, and what would keep them apart.
std::string self_description(const std::string& backend, const GlooPlace& place) {
  const bool loopback = place.address.starts_with("127.") || place.address == "::1";
  return fmt::format("{} {}", backend, loopback ? "loopback" : "network");
}

void compare_descriptions(const std::vector<std::string>& words, int rank) {
  for (size_t other = 1; other < words.size(); ++other) {
    if (words[other] == words[0]) continue;
    fail(Code::kBackend,
         "[rank {}] the ranks would not reach each other: rank 0 has '{}', rank {} has '{}' (backend, and how gloo "
         "would "
         "listen). Choose one backend for all; where one listens on loopback only, set GLOO_SOCKET_IFNAME to the "
         "interface that connects the machines, and MASTER_ADDR to an address on it.",
         rank, words[0], other, words[other]);
  }
}

}  // namespace

struct ProcessGroup::State {
  c10::intrusive_ptr<c10d::ProcessGroup> c10d;
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  at::Device device = at::kCPU;
  std::string backend;
  GroupOptions options;
  GlooPlace place;
  bool serves_store = false;
  mutable std::atomic<int> barriers = 0;
  mutable std::atomic<int> subgroups = 0;
  std::shared_ptr<Connections> connections{};  // of the world; null until it stands: nobody is to be waited for

  [[nodiscard]] Meeting meeting(std::string key, std::string what, std::chrono::milliseconds timeout) const {
    return {.store = store,
            .key = "lockstep/" + std::move(key),
            .rank = rank,
            .size = size,
            .timeout = timeout,
            .what = std::move(what),
            .serves_store = serves_store};
  }

  void connect(const std::string& name) {
    try {
      const auto gloo = make_gloo_backend(with_prefix("lockstep/gloo", store), rank, size, place, options.timeout());
      const auto nccl = backend == "nccl"
                            ? make_nccl_backend(with_prefix("lockstep/nccl", store), rank, size, options.timeout())
                            : BackendPtr();
      c10d = make_process_group(store, rank, size, name, gloo, nccl);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      fail(Code::kBackend,
           "[rank {}] all ranks are there, but could not be connected by {}: {}. Check that the machines reach each "
           "other "
           "on the interface that GLOO_SOCKET_IFNAME names, or on the one of MASTER_ADDR.",
           rank, backend, torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
    }
  }
};

const ProcessGroup::State& ProcessGroup::state() const {
  if (!state_) {
    fail(Code::kFrontArgument,
         "this rank is not in the process group, so it has no rank and nothing to wait for there. Ask `if (group)` "
         "first.");
  }
  return *state_;
}

int ProcessGroup::rank() const { return state().rank; }
int ProcessGroup::size() const { return state().size; }
int ProcessGroup::local_rank() const { return state().local_rank; }
const std::string& ProcessGroup::backend() const { return state().backend; }
at::Device ProcessGroup::device() const { return state().device; }
std::chrono::milliseconds ProcessGroup::timeout() const { return state().options.timeout(); }
const c10::intrusive_ptr<c10d::ProcessGroup>& ProcessGroup::c10d() const { return state().c10d; }
const c10::intrusive_ptr<c10d::Store>& ProcessGroup::store() const { return state().store; }

Meeting ProcessGroup::meeting(const std::string& key, const std::string& what) const {
  return state().meeting(key, what, timeout());
}

void ProcessGroup::barrier(std::chrono::milliseconds timeout) const {
  const State& self = state();
  const int number = self.barriers++;
  const auto key = [&](int i) { return fmt::format("barrier/{}", i); };
  (void)exchange_words(self.meeting(key(number), fmt::format("reach barrier {}", number),
                                    timeout.count() > 0 ? timeout : self.options.timeout()),
                       "here");
  // All are past the barrier before: nobody looks for its keys any more.
  if (number == 0) return;
  const std::string before = "lockstep/" + key(number - 1);
  self.store->deleteKey(fmt::format("{}/{}", before, self.rank));
  if (self.rank != 0) return;
  self.store->deleteKey(before + "/read");
  self.store->deleteKey(before + "/all_read");
}

ProcessGroup ProcessGroup::new_group(const std::vector<int>& ranks) const {
  const State& self = state();
  const std::string key = fmt::format("group/{}", self.subgroups++);
  const std::string mine = fmt::format("{}", fmt::join(ranks, ","));
  const auto words = exchange_words(self.meeting(key, "make a new group", self.options.timeout()), mine);
  for (size_t other = 0; other < words.size(); ++other) {
    if (words[other] == words[0]) continue;
    fail(Code::kFrontArgument,
         "[rank {}] new_group needs equal lists on every rank, but rank 0 gave [{}] and rank {} [{}].", self.rank,
         words[0], other, words[other]);
  }
  const std::set<int> unique(ranks.begin(), ranks.end());
  if (ranks.empty() || unique.size() != ranks.size() || *unique.begin() < 0 || *unique.rbegin() >= self.size) {
    fail(Code::kFrontArgument, "[rank {}] new_group takes different ranks from 0 to {}, at least one, but got [{}].",
         self.rank, self.size - 1, mine);
  }
  const auto place = std::find(ranks.begin(), ranks.end(), self.rank);
  if (place == ranks.end()) return {};
  auto sub = std::make_shared<State>();
  sub->store = with_prefix("lockstep/" + key, self.store);
  sub->rank = static_cast<int>(place - ranks.begin());
  sub->size = static_cast<int>(ranks.size());
  sub->local_rank = self.local_rank;
  sub->device = self.device;
  sub->backend = self.backend;
  sub->options = self.options;
  sub->place = self.place;
  sub->serves_store = self.serves_store;
  sub->connect(self.c10d->getGroupName() + "/" + key);
  self.connections->add(sub->c10d);
  sub->connections = self.connections;
  return ProcessGroup(std::move(sub));
}

ProcessGroup init_process_group(const Launch& launch, const GroupOptions& options,
                                c10::intrusive_ptr<c10d::Store> store) {
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = launch.rank;
  state->size = launch.world_size;
  state->local_rank = launch.local_rank.value_or(0);
  state->options = options;
  std::string name = options.name();
  if (store) {
    state->store = std::move(store);
  } else if (launch.world_size == 1) {
    state->store = c10::make_intrusive<c10d::HashStore>();
  } else {
    Rendezvous meeting_point = join_store(launch, options.start_timeout());
    state->store = std::move(meeting_point.store);
    state->serves_store = meeting_point.serves;
    name += "/" + meeting_point.name;
  }
  const auto patience = options.start_timeout() + (state->serves_store ? kServerGrace : std::chrono::seconds(0));
  together(state->meeting("start", "start", patience), [&] {
    state->backend = chosen_backend(launch, options);
    state->place = gloo_place(launch, options);
  });
  compare_descriptions(
      exchange_words(state->meeting("describe", "start", patience), self_description(state->backend, state->place)),
      launch.rank);
  if (state->backend == "nccl") state->device = use_gpu(state->local_rank);
  state->connect(name);
  state->connections = std::make_shared<Connections>(
      Connections::World{.store = state->store,
                         .rank = state->rank,
                         .size = state->size,
                         .serves_store = state->serves_store,
                         .patience = std::min<std::chrono::milliseconds>(kFarewell, options.timeout())});
  state->connections->add(state->c10d);
  return ProcessGroup(std::move(state));
}

ProcessGroup init_process_group_from_env(const GroupOptions& options) {
  return init_process_group(read_launch(process_environment(), options.allow_single()), options);
}

}  // namespace lockstep
