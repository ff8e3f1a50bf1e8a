#include "comm/flights.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "core/error.h"

namespace lockstep {

EventPool::~EventPool() {
  for (const cudaEvent_t event : free_) (void)cudaEventDestroy(event);
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void EventPool::give_back(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

Flight::Flight(std::shared_ptr<EventPool> events, const char* collective, int64_t number, int64_t bytes)
    : events_(std::move(events)), collective_(collective), number_(number), bytes_(bytes), end_(events_->take()) {}

void Flight::depart(cudaStream_t stream) {
  C10_CUDA_CHECK(cudaEventRecord(end_, stream));
  departed_.store(true, std::memory_order_release);
}

Flight::State Flight::state() const {
  if (!departed_.load(std::memory_order_acquire)) return State::kIssuing;
  const cudaError_t status = cudaEventQuery(end_);
  if (status == cudaSuccess) return State::kLanded;
  (void)cudaGetLastError();
  return status == cudaErrorNotReady ? State::kFlying : State::kBroken;
}

std::string Flight::label() const { return fmt::format("{} #{} ({} bytes)", collective_, number_, bytes_); }

FlightPtr FlightLog::board(const char* collective, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto flight = std::make_shared<Flight>(events_, collective, issued_++, bytes);
  if (flights_.empty()) oldest_since_ = Flight::Clock::now();
  flights_.push_back(flight);
  return flight;
}

void FlightLog::forget(const FlightPtr& flight) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(flights_.rbegin(), flights_.rend(), flight);
  if (found != flights_.rend()) flights_.erase(std::next(found).base());
}

FlightLog::Oldest FlightLog::oldest() {
  const std::lock_guard lock(mutex_);
  const auto now = Flight::Clock::now();
  while (!flights_.empty()) {
    const Flight::State state = flights_.front()->state();
    if (state != Flight::State::kLanded) return {flights_.front(), now - oldest_since_, state};
    flights_.pop_front();
    oldest_since_ = now;
  }
  return {};
}

void FlightLog::fail_all(std::string report, Cause cause) {
  const std::lock_guard lock(mutex_);
  if (!report_.empty()) return;
  report_ = std::move(report);
  cause_ = cause;
}

bool FlightLog::failed() const {
  const std::lock_guard lock(mutex_);
  return !report_.empty();
}

void FlightLog::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  if (report_.empty()) return;
  if (cause_ == Cause::kElsewhere) throw CollectiveError(report_);
  throw Error(report_);
}

}  // namespace lockstep
