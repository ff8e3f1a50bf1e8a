// The connections of a world and of its subgroups, and how they end.
#pragma once

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep {

/// Ends connections together on all ranks, when the last handle of a world and of its subgroups goes.
///
/// c10d's NCCL backend wants to be told: its `shutdown` finishes what is on its way, for which the other ranks are
/// needed; its `abort` does not need them and loses what is on its way; its destructor alone warns, and aborts. So the
/// ranks first say in the store that they have come to the end. Where all have, backends are shut down, the youngest
/// group first; where one is late, dead, or this rank is leaving because of an exception, they are aborted. Subgroups
/// stay open until then: ranks drop them at different times, and the first one would wait for the others.
class Connections {
 public:
  struct World {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int size = 1;
    bool serves_store = false;             ///< Without this process the others cannot read any more: it leaves last.
    std::chrono::milliseconds patience{};  ///< With the ranks that are to come here.
  };

  explicit Connections(World world) : world_(std::move(world)) {}
  /// Ends all of them; never throws. Warns about ranks that did not come. In a forked child it does nothing: sockets
  /// and store are the parent's, and threads are not there.
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  /// Thread-safe.
  void add(c10::intrusive_ptr<c10d::ProcessGroup> group);

 private:
  [[nodiscard]] bool all_came() const;
  void leave() const;

  World world_;
  pid_t process_ = getpid();
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

}  // namespace lockstep
