#include "comm/timed_communicator.h"

#include <ATen/ATen.h>

#include <utility>

#include "comm/known_end.h"
#include "core/clock.h"

namespace lockstep {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
  return static_cast<int64_t>(tensor.nbytes());
}

int64_t bytes_of(std::span<const at::Tensor> tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

/// Where the backend does not say when a collective ended, its end is when somebody had waited for it.
class TimedTransfer final : public Transfer {
 public:
  TimedTransfer(TransferPtr inner, CollectiveRecordPtr record) : inner_(std::move(inner)), record_(std::move(record)) {}

  void wait() override {
    inner_->wait();
    note_end();
  }
  bool wait_for(std::chrono::milliseconds patience) override {
    const bool done = inner_->wait_for(patience);
    if (done) note_end();
    return done;
  }

 private:
  void note_end() {
    int64_t not_yet = 0;
    if (!record_->exact) record_->ended.compare_exchange_strong(not_yet, steady_ns());
  }

  TransferPtr inner_;
  CollectiveRecordPtr record_;
};

}  // namespace

template <typename Issue>
TransferPtr TimedCommunicator::note(const char* kind, int64_t bytes, const Issue& issue) {
  auto record = std::make_shared<CollectiveRecord>();
  record->kind = kind;
  record->bytes = bytes;
  record->issued = Moment::here(device_);
  TransferPtr transfer = issue();
  if (auto* known = dynamic_cast<KnownEnd*>(transfer.get())) {
    if (!side_) {
      record->exact = known->tell_end([record] { record->ended.store(steady_ns()); });
    } else if (known->lead(*side_)) {
      record->ended_event = timed_event(*side_);
      record->exact = true;
    }
  }
  records_.push_back(record);
  return std::make_unique<TimedTransfer>(std::move(transfer), std::move(record));
}

TransferPtr TimedCommunicator::sum(at::Tensor data) {
  const int64_t bytes = bytes_of(data);
  return note("all_reduce", bytes, [&] { return inner_->sum(std::move(data)); });
}

TransferPtr TimedCommunicator::sum_all(std::span<const at::Tensor> tensors) {
  return note("all_reduce", bytes_of(tensors), [&] { return inner_->sum_all(tensors); });
}

TransferPtr TimedCommunicator::max(at::Tensor data) {
  const int64_t bytes = bytes_of(data);
  return note("all_reduce", bytes, [&] { return inner_->max(std::move(data)); });
}

TransferPtr TimedCommunicator::average(at::Tensor data) {
  const int64_t bytes = bytes_of(data);
  return note("all_reduce", bytes, [&] { return inner_->average(std::move(data)); });
}

TransferPtr TimedCommunicator::average_all(std::span<const at::Tensor> tensors) {
  return note("all_reduce", bytes_of(tensors), [&] { return inner_->average_all(tensors); });
}

TransferPtr TimedCommunicator::broadcast(at::Tensor data, int root) {
  const int64_t bytes = bytes_of(data);
  return note("broadcast", bytes, [&] { return inner_->broadcast(std::move(data), root); });
}

TransferPtr TimedCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  const int64_t bytes = bytes_of(output);
  return note("all_gather", bytes, [&] { return inner_->all_gather(std::move(output), std::move(input)); });
}

TransferPtr TimedCommunicator::all_to_all(at::Tensor output, at::Tensor input) {
  const int64_t bytes = bytes_of(output);
  return note("all_to_all", bytes, [&] { return inner_->all_to_all(std::move(output), std::move(input)); });
}

TransferPtr TimedCommunicator::reduce_scatter(at::Tensor output, at::Tensor input) {
  const int64_t bytes = bytes_of(input);
  return note("reduce_scatter", bytes, [&] { return inner_->reduce_scatter(std::move(output), std::move(input)); });
}

}  // namespace lockstep
