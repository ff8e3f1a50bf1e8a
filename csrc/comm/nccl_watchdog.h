// The thread that notices when an NCCL communicator is stuck or broken, and ends it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/flights.h"
#include "comm/nccl_handle.h"

namespace lockstep {

/// What the watchdog says about its communicator.
struct NcclIdentity {
  int rank;
  int size;
  int device;
};

/// Looks several times a second at the oldest flight and at NCCL's own errors. When something is wrong it writes the
/// report into the log, so that every later call throws it, and aborts the communicator.
class NcclWatchdog {
 public:
  /// @param calls  held by whoever is inside NCCL. A caller who does not come out within a second is stuck there, and
  ///               the abort is what brings it out.
  NcclWatchdog(NcclHandle& handle, std::shared_ptr<FlightLog> log, std::timed_mutex& calls, NcclIdentity who,
               std::chrono::milliseconds timeout);
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  /// Has the thread end the communicator for this reason, which carries its code. From any thread.
  void request_end(std::string report);
  /// Stops the thread, after an abort that has begun.
  ~NcclWatchdog();

 private:
  void run();
  /// What is wrong, with a report for people; the report is empty when all is well.
  struct Finding {
    std::string report{};
    FlightLog::Cause cause = FlightLog::Cause::kHere;
  };
  Finding look();
  std::string stuck(const FlightLog::Oldest& oldest) const;
  void end(Finding finding);

  NcclHandle& handle_;
  std::shared_ptr<FlightLog> log_;
  std::timed_mutex& calls_;
  NcclIdentity who_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::string requested_;
  std::thread thread_;
};

}  // namespace lockstep
