#include "lockstep/rendezvous.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/error.h"

namespace lockstep {
namespace {

struct Place {
  std::mutex mutex;  // held while connecting: ranks that are threads must not wait for each other
  c10::intrusive_ptr<c10d::Store> store;
  int worlds = 0;
};

/// One a place and rank. Ends at the end of the process, before the library's own static objects.
Place& place_of(const Launch& launch) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Place>> places;
  const std::lock_guard lock(mutex);
  auto& place = places[fmt::format("{}:{}/{}/{}", launch.master_addr, launch.master_port, launch.attempt, launch.rank)];
  if (!place) place = std::make_unique<Place>();
  return *place;
}

c10::intrusive_ptr<c10d::Store> connect(const Launch& launch, bool serves, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.isServer = serves;
  options.waitWorkers = false;  // who is missing is found out by name
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(launch.master_addr, options);
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    const std::string cause = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
    if (serves) {
      fail(Code::kLaunch,
           "[rank 0] cannot serve the store of this run at port {}: {}. Another run or program may have the port: "
           "choose "
           "another MASTER_PORT, the same for all ranks.",
           launch.master_port, cause);
    }
    fail(Code::kWorldIncomplete,
         "[rank {}] {} did not answer at {}:{} within {:.1f} s: missing {}. Look whether it was started and what it "
         "printed last, and whether MASTER_ADDR and MASTER_PORT are the same for all ranks. ({})",
         launch.rank, launch.agent_store ? "torchrun's agent" : "rank 0", launch.master_addr, launch.master_port,
         static_cast<double>(timeout.count()) / 1000, launch.agent_store ? "its store" : "0", cause);
  }
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

}  // namespace

Rendezvous join_store(const Launch& launch, std::chrono::milliseconds timeout) {
  Place& place = place_of(launch);
  const std::lock_guard lock(place.mutex);
  const bool serves = launch.rank == 0 && !launch.agent_store;
  if (!place.store) place.store = connect(launch, serves, timeout);
  const std::string name = fmt::format("world_{}_{}", launch.attempt, place.worlds++);
  return {
      .store = c10::make_intrusive<c10d::PrefixStore>("lockstep/" + name, place.store), .name = name, .serves = serves};
}

std::string local_address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, FreeAddresses> list(found);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const int socket_id = socket(entry->ai_family, entry->ai_socktype, entry->ai_protocol);
    if (socket_id < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    std::array<char, NI_MAXHOST> text{};
    // Connecting a datagram socket only picks the route.
    const bool known = ::connect(socket_id, entry->ai_addr, entry->ai_addrlen) == 0 &&
                       getsockname(socket_id, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
                       getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text.data(), text.size(), nullptr, 0,
                                   NI_NUMERICHOST) == 0;
    ::close(socket_id);
    if (known) return text.data();
  }
  return {};
}

}  // namespace lockstep
