// A communicator that notes when its collectives began and ended.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "comm/moment.h"

namespace lockstep {

/// One collective of this rank.
struct CollectiveRecord {
  const char* kind = "";  ///< "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast".
  int64_t bytes = 0;      ///< Its size as nccl-tests counts: of the larger of input and output, on one rank.
  Moment issued;
  std::atomic<int64_t> ended = 0;           ///< By the clock; 0: not yet, or only the device knows.
  std::shared_ptr<c10::Event> ended_event;  ///< On a device.
  bool exact = false;  ///< `ended` is when the collective ended; else when this rank had waited for it.
};
using CollectiveRecordPtr = std::shared_ptr<CollectiveRecord>;

/// Passes every call on to `inner` and notes it in `records`. Meant for one bucket of one pass. On a device the ends
/// are marked on `side`, a stream of their own on which nothing else happens; null on the host.
class TimedCommunicator final : public Communicator {
 public:
  TimedCommunicator(std::shared_ptr<Communicator> inner, at::Device device, std::optional<c10::Stream> side)
      : inner_(std::move(inner)), device_(device), side_(side) {}

  [[nodiscard]] const std::vector<CollectiveRecordPtr>& records() const { return records_; }

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }
  TransferPtr sum(at::Tensor data) override;
  TransferPtr sum_all(std::span<const at::Tensor> tensors) override;
  TransferPtr max(at::Tensor data) override;
  TransferPtr average(at::Tensor data) override;
  TransferPtr average_all(std::span<const at::Tensor> tensors) override;
  [[nodiscard]] std::optional<int64_t> worth_averaging_alone() const override {
    return inner_->worth_averaging_alone();
  }
  TransferPtr broadcast(at::Tensor data, int root) override;
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override;
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override;
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override;
  bool abort(const std::string& report) override { return inner_->abort(report); }
  void outwait(const std::function<bool(std::chrono::milliseconds)>& wait_for) override { inner_->outwait(wait_for); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  [[nodiscard]] std::shared_ptr<Monitor> monitor() const override { return inner_->monitor(); }

 private:
  template <typename Issue>
  TransferPtr note(const char* kind, int64_t bytes, const Issue& issue);

  std::shared_ptr<Communicator> inner_;
  at::Device device_;
  std::optional<c10::Stream> side_;
  std::vector<CollectiveRecordPtr> records_;
};

}  // namespace lockstep
