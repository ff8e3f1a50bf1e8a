// What happened to each bucket of a step, and when; kept only while somebody asks for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/timed_communicator.h"
#include "core/bucket_plan.h"

namespace lockstep {

/// How much is recorded of each step.
enum class RecordLevel {
  kOff,      ///< Nothing, which costs nothing.
  kStep,     ///< The parts of the step: four moments.
  kBuckets,  ///< Every bucket and every collective too, and ranges for NVTX where there is a CUDA device.
};

/// One collective. Times are in nanoseconds of this host's steady clock, those of a device brought to it; 0: unknown.
struct CollectiveTimes {
  std::string kind;  ///< As in `CollectiveRecord`, like the next.
  int64_t bytes = 0;
  int64_t issued = 0;
  int64_t ended = 0;
  bool exact = false;  ///< False: `ended` is when this rank had waited for it.
};

/// One bucket.
struct BucketTimes {
  size_t bucket = 0;
  int64_t bytes = 0;       ///< Of its gradients.
  int64_t ready = 0;       ///< Its last gradient was there.
  int64_t started = 0;     ///< It was its turn, and packing began.
  int64_t sent = 0;        ///< It was packed and handed to its hook.
  int64_t wait_start = 0;  ///< The end of backward began to wait for it.
  int64_t wait_end = 0;    ///< Its mean was there.
  std::vector<CollectiveTimes> collectives;
};

/// One reduced pass.
struct PassTimes {
  int64_t pass = 0;  ///< Reduced passes before this one.
  int64_t forward_start = 0;
  int64_t backward_start = 0;
  int64_t backward_end = 0;  ///< All gradients of this rank were there.
  int64_t end = 0;           ///< All means were there.
  std::vector<BucketTimes> buckets;
};

/// Records passes while they run: to be called where `records_steps` (of a bucket: `records_buckets`) says so. Expects
/// the reducer's mutex to be held.
class Recording {
 public:
  /// Passes that are kept until they are taken; the oldest are dropped then.
  static constexpr size_t kKept = 64;

  /// Forgets what was recorded. With a device, waits for it once, to compare its clock with the host's.
  void set_level(RecordLevel level, at::Device device);
  [[nodiscard]] bool records_steps() const { return level_ != RecordLevel::kOff; }
  [[nodiscard]] bool records_buckets() const { return level_ == RecordLevel::kBuckets; }

  void begin_forward();
  void begin_backward(const BucketPlan& plan);
  void end_backward();
  void arrived(BucketId id);
  /// This bucket's turn: returns what its hook is to communicate through, which lives until the pass ends.
  [[nodiscard]] Communicator& start(BucketId id, int64_t bytes, const std::shared_ptr<Communicator>& comm);
  void sent(BucketId id);
  void begin_wait(BucketId id);
  void end_wait(BucketId id);
  void end_pass(int64_t pass);
  /// The pass came to nothing.
  void drop_pass() { running_ = {}; }

  /// The passes, oldest first, that the device has left behind as well; they are forgotten here. Waits for nothing.
  [[nodiscard]] std::vector<PassTimes> take();

 private:
  struct BucketMoments {
    BucketId id{};
    int64_t bytes = 0;
    Moment ready, started, sent, wait_start, wait_end;
    std::unique_ptr<TimedCommunicator> comm;
    std::vector<CollectiveRecordPtr> collectives;
  };
  struct PassMoments {
    int64_t pass = 0;
    Moment forward_start, backward_start, backward_end, end;
    std::vector<BucketMoments> buckets;  // by BucketId; without a start: not sent
  };

  [[nodiscard]] Moment here() const { return Moment::here(device_); }
  [[nodiscard]] bool has_passed(const PassMoments& pass) const;
  [[nodiscard]] int64_t time_of(const Moment& moment) const;
  [[nodiscard]] int64_t time_of(const std::shared_ptr<c10::Event>& event) const;
  [[nodiscard]] BucketTimes times_of(const BucketMoments& bucket) const;

  RecordLevel level_ = RecordLevel::kOff;
  at::Device device_ = at::kCPU;
  std::optional<c10::Stream> side_;
  std::vector<size_t> missing_;  // gradients, by BucketId
  PassMoments running_;
  std::deque<PassMoments> finished_;
  Moment anchor_;  // an event whose time on the host's clock is known
};

/// A range for NVTX until the end of the scope, if `on` and this process has NVTX.
class NvtxRange {
 public:
  NvtxRange(bool on, const std::string& name);
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

 private:
  bool on_;
};

}  // namespace lockstep
