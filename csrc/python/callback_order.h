// Whether a hook goes on communicating when its own start has returned.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace lockstep::python {

/// A callback of a future may issue another collective, on the thread that completed the first one. With several
/// buckets on their way, these callbacks run in another order on each rank: collectives of different buckets meet,
/// which ends the process under gloo. So a hook starts with one bucket at a time, until a whole pass has shown that the
/// groups which it may use count at most one collective for each bucket, and none after `start` has returned; one that
/// does communicate later stays with one at a time. So does one with several: a callback that is added to a complete
/// future runs at once, within `start`, and may come later the next time. A hook that changes its habits after such a
/// pass is not noticed.
///
/// Only for tensors on the host: on a device callbacks run when they are added, in the order of the buckets.
class CallbackOrder {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// @param groups  those that count; none: every hook may overlap its buckets.
  explicit CallbackOrder(std::vector<Group> groups) : groups_(std::move(groups)) {
    if (groups_.empty()) habit_ = Habit::kDoneWhenStarted;
  }

  [[nodiscard]] bool one_at_a_time() const { return habit_ != Habit::kDoneWhenStarted; }

  /// Every bucket of the pass is done, or given up.
  void on_pass_ended() {
    if (habit_ == Habit::kUnknown && has_seen_one_ && !has_seen_several_) habit_ = Habit::kDoneWhenStarted;
    has_seen_one_ = has_seen_several_ = false;
  }
  /// The hook is about to be called.
  void on_starting() { starting_at_ = count(); }
  /// The hook has returned, and no callback that it left behind has run: the GIL is held.
  void on_started() {
    started_at_ = count();
    has_seen_several_ = has_seen_several_ || started_at_ > starting_at_ + 1;
  }
  /// The bucket's future is complete, and no other bucket has been started.
  void on_done() {
    if (habit_ != Habit::kUnknown) return;
    has_seen_one_ = true;
    if (count() != started_at_) habit_ = Habit::kCommunicatesLater;
  }

 private:
  enum class Habit { kUnknown, kDoneWhenStarted, kCommunicatesLater };

  [[nodiscard]] uint64_t count() const {
    uint64_t sum = 0;
    for (const Group& group : groups_) sum += group->getSequenceNumberForGroup();
    return sum;
  }

  std::vector<Group> groups_;
  Habit habit_ = Habit::kUnknown;
  bool has_seen_one_ = false;      // in this pass
  bool has_seen_several_ = false;  // in this pass, collectives of one bucket
  uint64_t starting_at_ = 0;
  uint64_t started_at_ = 0;
};

}  // namespace lockstep::python
