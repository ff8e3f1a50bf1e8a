// Collectives on their way on a CUDA stream: the events that mark their ends, and the failure that ended them all.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep {

/// CUDA events without timing, to be used again. Thread-safe.
class EventPool {
 public:
  EventPool() = default;
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool();

  /// An event of the current device.
  [[nodiscard]] cudaEvent_t take();
  void give_back(cudaEvent_t event);

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

/// One collective, from the moment it is issued.
class Flight {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kIssuing, kFlying, kLanded, kBroken };

  /// @param collective  a literal: "all-reduce".
  /// @param bytes       on this rank, for messages.
  Flight(std::shared_ptr<EventPool> events, const char* collective, int64_t number, int64_t bytes);
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  ~Flight() { events_->give_back(end_); }

  /// Marks the end of the collective: whatever `stream` has been given so far.
  void depart(cudaStream_t stream);
  /// @returns kBroken  if CUDA itself reports an error.
  [[nodiscard]] State state() const;

  /// What later work waits for.
  [[nodiscard]] cudaEvent_t end() const { return end_; }
  /// "all-reduce #7 (1024 bytes)".
  [[nodiscard]] std::string label() const;

 private:
  std::shared_ptr<EventPool> events_;
  const char* collective_;
  int64_t number_;
  int64_t bytes_;
  cudaEvent_t end_;
  std::atomic<bool> departed_ = false;
};

using FlightPtr = std::shared_ptr<Flight>;

/// All flights of one communicator, in order. Thread-safe; shared by the communicator, its transfers and its watchdog,
/// whichever lives longest. Its lock is the innermost of all, and nothing is waited for under it.
class FlightLog {
 public:
  /// Adds a flight that is about to be issued.
  [[nodiscard]] FlightPtr board(const char* collective, int64_t bytes);
  /// Takes out a flight that is not to be watched: it was captured into a graph, or never left.
  void forget(const FlightPtr& flight);

  struct Oldest {
    FlightPtr flight;                ///< Null: nothing is on its way.
    Flight::Clock::duration age{0};  ///< Since it was both issued and the oldest, as far as anybody has looked.
    Flight::State state = Flight::State::kLanded;
  };
  /// Forgets what has landed and returns the oldest flight that has not. Not while this thread captures a graph.
  [[nodiscard]] Oldest oldest();

  enum class Cause { kHere, kElsewhere };
  /// The end of everything. The first report counts; it carries its code.
  /// @param cause  where it is most likely to be found: on this rank, or on another one.
  void fail_all(std::string report, Cause cause);
  [[nodiscard]] bool failed() const;
  /// @throws lockstep::Error  with the report, if there is one; a CollectiveError when the cause is elsewhere.
  void throw_if_failed() const;

 private:
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
  mutable std::mutex mutex_;
  std::deque<FlightPtr> flights_;
  Flight::Clock::time_point oldest_since_{};
  int64_t issued_ = 0;
  std::string report_;
  Cause cause_ = Cause::kHere;
};

}  // namespace lockstep
