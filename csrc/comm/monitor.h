// Talks about waiting through the store, and not through the group that may be stuck.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/device_mark.h"
#include "core/error.h"
#include "core/peer_watch.h"
#include "core/progress.h"

namespace lockstep {

/// Waiting for another rank has become hopeless. The group cannot be used any more.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// Writes one line a second about this rank into the store, and reads those of the others while this rank waits.
///
/// A wait longer than the threshold is reported on stderr, with where every missing rank stands; the report is repeated
/// at twice the age. When waiting has become hopeless (a rank failed, left, or has been silent beyond the threshold),
/// `raise_if_hopeless` throws. On a device the host does not wait, and training may block anywhere behind a collective
/// that never ends: when a marked place is not reached for the threshold and a rank has failed or died, the collectives
/// are aborted, and `raise_if_lost` throws from then on. One thread per monitor; a store that does not answer ends it,
/// never the training.
///
/// Traffic: one small write a second; while waiting, one read of all lines a second in groups of up to 100 ranks, more
/// rarely in larger ones.
class Monitor {
 public:
  /// @param store      shared by all ranks of the group; equal prefix on all. A connection of its own is made.
  /// @param threshold  > 0. Waits shorter than this are nobody's business.
  Monitor(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::shared_ptr<Progress> progress,
          std::chrono::milliseconds threshold);
  /// Tells the others that this rank has left. Returns within about a second, whatever the store does.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// @throws PeerError  waiting makes no sense any more.
  void raise_if_hopeless();

  /// @throws PeerError  the collectives were aborted: what the device has computed since is of no use.
  void raise_if_lost();

  /// Aborts the collectives, if that was not done yet; `raise_if_lost` throws `reason` from then on.
  void give_up(const std::string& reason);

  /// Lives as long as this rank is in a call that may wait for the other ranks, although nobody says so: one that
  /// starts a collective (some backends connect the ranks with the first of a kind), or a hook of the user's. Beyond
  /// the threshold it counts as a wait here; to the others it may as well be slow. One inside another is part of it.
  class Call {
   public:
    /// @param awaits  what the rank waits for meanwhile; a literal.
    Call(Monitor& monitor, const char* awaits);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Monitor& monitor_;
    bool outermost_;
  };

  /// What `device`'s current stream has been given so far ends this step, and needs the other ranks.
  void mark(at::Device device);

  /// Aborts the collectives of this rank, given the reason, and says whether there was anything to abort.
  using Abort = std::function<bool(const std::string&)>;
  /// Called from any thread, at most once.
  void set_abort(Abort abort);

  struct Cause {
    std::string text;    ///< What was found out about the other ranks, with its code.
    bool found = false;  ///< It was one of them. Else the failure is published as our own.
  };
  /// A collective has failed here, and the cause is probably another rank: says so to the others, and gives that one
  /// a moment to be seen dead or failed.
  [[nodiscard]] Cause explain_failure(const std::string& text);

  /// Publishes at once that this rank has failed, if the store answers.
  void publish_failure(const std::string& text);

  /// What all ranks say about themselves now. Empty entries: never heard of. May block for as long as the store does.
  [[nodiscard]] PeerWatch::Lines lines();

  [[nodiscard]] int rank() const;

  /// Has the thread print where all ranks stand. Callable from a signal handler.
  static void request_dump();

 private:
  struct State;
  std::shared_ptr<State> state_;  // outlives this object when the store blocks its thread
  std::thread thread_;
};

/// A connection to the store of `group` under a prefix for one more replica, or null where the group has none that a
/// thread of ours may use (one written in Python).
[[nodiscard]] c10::intrusive_ptr<c10d::Store> monitor_store(const c10::intrusive_ptr<c10d::Store>& group_store,
                                                            const std::string& group_name, int rank);

}  // namespace lockstep
