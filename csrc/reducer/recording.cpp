#include "reducer/recording.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/clock.h"

namespace lockstep {

void Recording::set_level(RecordLevel level, at::Device device) {
  level_ = level;
  device_ = device;
  running_ = {};
  finished_.clear();
  anchor_ = {};
  side_.reset();
  if (level == RecordLevel::kOff || device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  side_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  anchor_ = here();
  anchor_.event->synchronize();
  anchor_.host = steady_ns();
}

void Recording::begin_forward() { running_.forward_start = here(); }

void Recording::begin_backward(const BucketPlan& plan) {
  running_.backward_start = here();
  if (running_.forward_start.host == 0) running_.forward_start = running_.backward_start;  // there was none
  if (!records_buckets()) return;
  running_.buckets.clear();
  running_.buckets.resize(plan.num_buckets());
  missing_.clear();
  for (const Bucket& bucket : plan.buckets()) missing_.push_back(bucket.params.size());
}

void Recording::end_backward() { running_.backward_end = here(); }

void Recording::arrived(BucketId id) {
  if (index(id) >= running_.buckets.size()) return;  // recording began in the middle of the pass
  if (--missing_[index(id)] == 0) running_.buckets[index(id)].ready = here();
}

Communicator& Recording::start(BucketId id, int64_t bytes, const std::shared_ptr<Communicator>& comm) {
  if (index(id) >= running_.buckets.size()) return *comm;
  BucketMoments& bucket = running_.buckets[index(id)];
  bucket.id = id;
  bucket.bytes = bytes;
  bucket.started = here();
  if (bucket.ready.host == 0) bucket.ready = bucket.started;  // it did not wait for all of its gradients
  bucket.comm = std::make_unique<TimedCommunicator>(comm, device_, side_);
  return *bucket.comm;
}

void Recording::sent(BucketId id) {
  if (index(id) < running_.buckets.size()) running_.buckets[index(id)].sent = here();
}

void Recording::begin_wait(BucketId id) {
  if (index(id) < running_.buckets.size()) running_.buckets[index(id)].wait_start = here();
}

void Recording::end_wait(BucketId id) {
  if (index(id) < running_.buckets.size()) running_.buckets[index(id)].wait_end = here();
}

void Recording::end_pass(int64_t pass) {
  if (running_.backward_start.host == 0) return drop_pass();  // recording began in the middle of it
  if (running_.backward_end.host == 0) running_.backward_end = running_.backward_start;  // without a backward
  running_.end = here();
  running_.pass = pass;
  std::erase_if(running_.buckets, [](const BucketMoments& bucket) { return bucket.wait_end.host == 0; });
  for (BucketMoments& bucket : running_.buckets) {
    if (bucket.comm) bucket.collectives = bucket.comm->records();
    bucket.comm.reset();
  }
  finished_.push_back(std::exchange(running_, {}));
  if (finished_.size() > kKept) finished_.pop_front();
}

bool Recording::has_passed(const PassMoments& pass) const {
  if (!pass.end.has_passed()) return false;
  return std::all_of(pass.buckets.begin(), pass.buckets.end(), [](const BucketMoments& bucket) {
    return std::all_of(bucket.collectives.begin(), bucket.collectives.end(), [](const CollectiveRecordPtr& record) {
      return record->ended_event ? record->ended_event->query() : record->ended.load() != 0 || !record->exact;
    });
  });
}

int64_t Recording::time_of(const std::shared_ptr<c10::Event>& event) const {
  return anchor_.host + std::llround(1e6 * anchor_.event->elapsedTime(*event));
}

int64_t Recording::time_of(const Moment& moment) const {
  return moment.event && anchor_.event ? time_of(moment.event) : moment.host;
}

BucketTimes Recording::times_of(const BucketMoments& bucket) const {
  BucketTimes times{.bucket = index(bucket.id),
                    .bytes = bucket.bytes,
                    .ready = time_of(bucket.ready),
                    .started = time_of(bucket.started),
                    .sent = time_of(bucket.sent),
                    .wait_start = time_of(bucket.wait_start),
                    .wait_end = time_of(bucket.wait_end),
                    .collectives = {}};
  for (const CollectiveRecordPtr& record : bucket.collectives) {
    // On a device the host knows nothing of an end without an event.
    const int64_t by_host = anchor_.event ? times.wait_end : record->ended.load();
    times.collectives.push_back({.kind = record->kind,
                                 .bytes = record->bytes,
                                 .issued = time_of(record->issued),
                                 .ended = record->ended_event ? time_of(record->ended_event) : by_host,
                                 .exact = record->exact});
  }
  return times;
}

std::vector<PassTimes> Recording::take() {
  std::vector<PassTimes> result;
  while (!finished_.empty() && has_passed(finished_.front())) {
    const PassMoments pass = std::move(finished_.front());
    finished_.pop_front();
    PassTimes& times = result.emplace_back();
    times.pass = pass.pass;
    times.forward_start = time_of(pass.forward_start);
    times.backward_start = time_of(pass.backward_start);
    times.backward_end = time_of(pass.backward_end);
    times.end = time_of(pass.end);
    for (const BucketMoments& bucket : pass.buckets) times.buckets.push_back(times_of(bucket));
    // Differences of events are float milliseconds: a near anchor keeps them exact in long runs.
    if (anchor_.event) anchor_ = {.host = times.end, .event = pass.end.event};
  }
  return result;
}

NvtxRange::NvtxRange(bool on, const std::string& name) : on_(on && torch::profiler::impl::cudaStubs()->enabled()) {
  if (on_) torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
}

NvtxRange::~NvtxRange() {
  if (on_) torch::profiler::impl::cudaStubs()->rangePop();
}

}  // namespace lockstep
