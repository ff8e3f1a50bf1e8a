#include "comm/nccl_watchdog.h"

#include <algorithm>

#include "comm/backends.h"
#include "core/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// How long a caller may take to leave NCCL before it counts as stuck inside.
constexpr milliseconds kGrace{1000};

double seconds(Flight::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

milliseconds interval(milliseconds timeout) { return std::clamp(timeout / 20, milliseconds(10), milliseconds(200)); }

}  // namespace

NcclWatchdog::NcclWatchdog(NcclHandle& handle, std::shared_ptr<FlightLog> log, std::timed_mutex& calls,
                           NcclIdentity who, milliseconds timeout)
    : handle_(handle), log_(std::move(log)), calls_(calls), who_(who), timeout_(timeout), thread_([this] { run(); }) {}

NcclWatchdog::~NcclWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void NcclWatchdog::request_end(std::string report) {
  {
    const std::lock_guard lock(mutex_);
    requested_ = std::move(report);
  }
  changed_.notify_all();
}

void NcclWatchdog::run() {
  (void)cudaSetDevice(who_.device);
  look_on_during_captures();
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, interval(timeout_), [this] { return stop_ || !requested_.empty(); });
    if (stop_) return;
    Finding finding = requested_.empty() ? look() : Finding{requested_};
    if (!finding.report.empty()) return end(std::move(finding));
  }
}

NcclWatchdog::Finding NcclWatchdog::look() {
  const FlightLog::Oldest oldest = log_->oldest();
  if (oldest.state == Flight::State::kBroken) {
    return {coded(Code::kDeviceFailed,
                  fmt::format("[rank {}] CUDA failed on cuda:{} before NCCL's {} was over, so no result after it can "
                              "be trusted. The error belongs to an earlier kernel: run with CUDA_LAUNCH_BLOCKING=1 to "
                              "see which, and restart the process.",
                              who_.rank, who_.device, oldest.flight->label()))};
  }
  ncclResult_t error = ncclSuccess;
  if (const std::unique_lock alone(calls_, std::try_to_lock); alone) error = handle_.async_error();
  if (error != ncclSuccess && error != ncclInProgress) {
    return {coded(Code::kReductionFailed,
                  fmt::format("[rank {}] NCCL failed on cuda:{} with {} on its way: {}. Another rank is probably gone; "
                              "its own output says why. The communicator of {} ranks was aborted; restart the run, "
                              "from a checkpoint.",
                              who_.rank, who_.device, oldest.flight ? oldest.flight->label() : "nothing",
                              nccl_reason(error), who_.size)),
            FlightLog::Cause::kElsewhere};
  }
  if (oldest.flight && oldest.age > timeout_) return {stuck(oldest), FlightLog::Cause::kElsewhere};
  return {};
}

std::string NcclWatchdog::stuck(const FlightLog::Oldest& oldest) const {
  return coded(
      Code::kStalled,
      fmt::format(
          "[rank {}] NCCL's {} on cuda:{} is not over after {:.1f} s ({}). Most likely another rank has not called it: "
          "an exception, a crash, or another number of steps there. NCCL: {}. The communicator of {} ranks was aborted "
          "and its results must not be used. See what the other ranks did, or raise NcclOptions::timeout ({:.1f} s).",
          who_.rank, oldest.flight->label(), who_.device, seconds(oldest.age),
          oldest.state == Flight::State::kIssuing ? "still connecting to the other ranks" : "on the device",
          nccl_reason(ncclSuccess), who_.size, seconds(timeout_)));
}

void NcclWatchdog::end(Finding finding) {
  log_->fail_all(std::move(finding.report), finding.cause);
  const std::unique_lock alone(calls_, kGrace);
  handle_.abort();
}

}  // namespace lockstep
