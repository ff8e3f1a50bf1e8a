// Reductions that take two collectives: the second ones leave together, when the first mean of the step is awaited.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "hooks/comm_hook.h"

namespace lockstep {

class TwoRounds;

/// The reductions of one hook that are in their first round. Second collectives are issued in the order of the first
/// ones and at the same point of a step on every rank, so that they match; and one after the other without waiting for
/// any of them, so that they overlap.
class Relay {
 public:
  void join(TwoRounds* runner) { runners_.push_back(runner); }
  void leave(const TwoRounds* runner) { std::erase(runners_, runner); }
  void pass_on();

 private:
  std::vector<TwoRounds*> runners_;
};

/// A mean in two rounds. The first collective has been issued when it is constructed.
class TwoRounds : public PendingMean {
 public:
  explicit TwoRounds(std::shared_ptr<Relay> relay) : relay_(std::move(relay)) { relay_->join(this); }
  ~TwoRounds() override { relay_->leave(this); }
  TwoRounds(const TwoRounds&) = delete;
  TwoRounds& operator=(const TwoRounds&) = delete;

  at::Tensor wait() final;

 protected:
  /// Waits for the first collective and issues the second.
  virtual void start_second() = 0;
  /// Waits for the second collective and returns the mean.
  virtual at::Tensor finish() = 0;

 private:
  friend class Relay;

  std::shared_ptr<Relay> relay_;
  std::exception_ptr failure_;  // of start_second, to be raised where this mean is awaited
};

}  // namespace lockstep
