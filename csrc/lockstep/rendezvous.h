// Where the ranks of a run meet: the key-value store that one process serves, and the way to its machine.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/launch.h"

namespace lockstep {

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  ///< With a prefix for this world alone.
  std::string name;                       ///< Of this world, the same on every rank.
  bool serves = false;                    ///< This process is the server.
};

/// Connects to the store at `launch`'s address; rank 0 serves it unless torchrun's agent does. The connection of a
/// place lives as long as the process, so that a second world of the same ranks can meet there. Thread-safe.
/// @throws lockstep::Error  nobody serves there in time, or the port is taken.
[[nodiscard]] Rendezvous join_store(const Launch& launch, std::chrono::milliseconds timeout);

/// The address of this machine's interface that leads to `host`, as text; empty where there is none. Sends nothing.
/// `createDefaultDevice` of gloo takes the address of the host name instead, which on many machines is a loopback one.
[[nodiscard]] std::string local_address_towards(const std::string& host, int port);

}  // namespace lockstep
