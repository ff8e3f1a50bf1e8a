#include "comm/nccl_communicator.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/flights.h"
#include "comm/known_end.h"
#include "comm/nccl_handle.h"
#include "comm/nccl_watchdog.h"
#include "comm/sparse_sum.h"
#include "core/error.h"

namespace lockstep {
namespace {

using c10::cuda::CUDAStream;

/// A collective on the communication stream. It keeps its tensors, so that their memory is not used for something else
/// meanwhile; after `wait` the current stream is behind the collective, and freeing them there is safe.
class NcclTransfer final : public Transfer, public KnownEnd {
 public:
  NcclTransfer(std::shared_ptr<FlightLog> log, FlightPtr flight, std::vector<at::Tensor> tensors, CUDAStream issued_on,
               CUDAStream runs_on)
      : log_(std::move(log)),
        flight_(std::move(flight)),
        tensors_(std::move(tensors)),
        issued_on_(issued_on),
        runs_on_(runs_on) {}

  ~NcclTransfer() override {
    try {
      tell_allocator(runs_on_);
    } catch (const std::exception&) {  // at the end of the process
    }
  }

  void wait() override {
    log_->throw_if_failed();
    const c10::cuda::CUDAGuard guard(runs_on_.device());
    const CUDAStream current = c10::cuda::getCurrentCUDAStream(runs_on_.device_index());
    C10_CUDA_CHECK(cudaStreamWaitEvent(current, flight_->end()));
    // Memory is given back to the stream it was allocated on, and that one does not wait.
    if (current != issued_on_) tell_allocator(runs_on_);
    tensors_.clear();
  }

  bool tell_end(const std::function<void()>& /*tell*/) override { return false; }

  bool lead(const c10::Stream& stream) override {
    C10_CUDA_CHECK(cudaStreamWaitEvent(CUDAStream(stream), flight_->end()));
    return true;
  }

 private:
  void tell_allocator(CUDAStream stream) {
    for (const at::Tensor& tensor : tensors_) {
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
    }
    tensors_.clear();
  }

  std::shared_ptr<FlightLog> log_;
  FlightPtr flight_;
  std::vector<at::Tensor> tensors_;
  CUDAStream issued_on_;
  CUDAStream runs_on_;
};

/// How a tensor is reduced: as `count` values of `type`.
struct Wire {
  ncclDataType_t type;
  size_t count;
  ncclRedOp_t op;
};

std::optional<ncclDataType_t> wire_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kByte:
    case at::kBool:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    default:
      return std::nullopt;
  }
}

// Within a host memory decides, not time: with 4 MiB a step takes as long.
constexpr int64_t kInPlaceWithinHost = 256 << 10;
constexpr int64_t kInPlaceAcross = 16 << 20;

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(c10d::Store& store, int rank, int size, const NcclOptions& options)
      : rank_(rank),
        size_(size),
        timeout_(options.timeout),
        device_(at::kCUDA, c10::cuda::current_device()),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        handle_(store, rank, size, options),
        in_place_bytes_(
            options.in_place_bytes.value_or(handle_.is_on_one_host() ? kInPlaceWithinHost : kInPlaceAcross)),
        log_(std::make_shared<FlightLog>()),
        fork_(events_.take()),
        watchdog_(std::in_place, handle_, log_, calls_, NcclIdentity{rank, size, device_.index()}, options.timeout) {}

  ~NcclCommunicator() override;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::string name() const override { return "nccl"; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }

  TransferPtr sum(at::Tensor data) override;
  TransferPtr max(at::Tensor data) override { return reduce("all-reduce (max)", std::span(&data, 1), ncclMax); }
  TransferPtr sum_all(std::span<const at::Tensor> tensors) override {
    return reduce("grouped all-reduce", tensors, ncclSum);
  }
  TransferPtr average_all(std::span<const at::Tensor> tensors) override {
    return reduce("grouped mean", tensors, ncclAvg);
  }
  [[nodiscard]] std::optional<int64_t> worth_averaging_alone() const override { return in_place_bytes_; }
  TransferPtr broadcast(at::Tensor data, int root) override;
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override;
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override;
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override;
  bool abort(const std::string& report) override {
    watchdog_->request_end(report);
    return true;
  }

 private:
  enum class Order { kAny, kRowMajor };

  void admit(const char* collective, const at::Tensor& tensor, Order order) const;
  void admit_pair(const char* collective, const at::Tensor& output, int64_t output_times, const at::Tensor& input,
                  int64_t input_times) const;
  [[nodiscard]] Wire wire_of(const at::Tensor& tensor, ncclRedOp_t op) const;
  TransferPtr reduce(const char* collective, std::span<const at::Tensor> tensors, ncclRedOp_t op);
  template <typename Launch>
  TransferPtr issue(const char* collective, std::vector<at::Tensor> tensors, const Launch& launch);
  void check(ncclResult_t result, const Flight& flight) const;

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  at::Device device_;
  CUDAStream stream_;  // of torch's pool, which outlives what the allocator remembers of it
  NcclHandle handle_;
  int64_t in_place_bytes_;
  std::shared_ptr<FlightLog> log_;
  EventPool events_;
  cudaEvent_t fork_;  // what the communication stream waits for at a call
  std::timed_mutex calls_;
  bool was_captured_ = false;  // a graph may hold the communicator
  std::optional<NcclWatchdog> watchdog_;
};

NcclCommunicator::~NcclCommunicator() {
  watchdog_.reset();
  events_.give_back(fork_);
  if (log_->failed()) return;  // the watchdog has aborted it
  const auto patience = std::min<std::chrono::milliseconds>(timeout_, kNcclFarewell);
  const auto deadline = Flight::Clock::now() + patience;
  FlightLog::Oldest oldest = log_->oldest();
  while (oldest.state == Flight::State::kFlying && Flight::Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    oldest = log_->oldest();
  }
  if (oldest.state == Flight::State::kLanded) {
    handle_.close(was_captured_ ? NcclHandle::Farewell::kLeave : NcclHandle::Farewell::kWait);
    return;
  }
  log_->fail_all(coded(Code::kAborted, fmt::format("[rank {}] the NCCL communicator was destroyed while {} was on its "
                                                   "way; its result must not be used. Wait for "
                                                   "every transfer first.",
                                                   rank_, oldest.flight->label())),
                 FlightLog::Cause::kHere);
  handle_.abort();
}

void NcclCommunicator::admit(const char* collective, const at::Tensor& tensor, Order order) const {
  const char* reason = nullptr;
  if (tensor.layout() != at::kStrided) {
    reason = "is sparse";
  } else if (tensor.device() != device_) {
    reason = "is on another device";
  } else if (!(order == Order::kRowMajor ? tensor.is_contiguous() : tensor.is_non_overlapping_and_dense())) {
    reason = "has gaps between its elements or an order of its own";
  }
  if (reason == nullptr) return;
  fail(Code::kNcclRefused,
       "[rank {}] {} was given a tensor of size {} on {} that {}. This communicator moves dense memory of {}. Copy the "
       "tensor there (contiguous, dense), or use the process group.",
       rank_, collective, fmt::join(tensor.sizes(), "x"), tensor.device().str(), reason, device_.str());
}

/// Checks that `output` has `output_times` and `input` has `input_times` as many elements as their common chunk.
void NcclCommunicator::admit_pair(const char* collective, const at::Tensor& output, int64_t output_times,
                                  const at::Tensor& input, int64_t input_times) const {
  admit(collective, output, Order::kRowMajor);
  admit(collective, input, Order::kRowMajor);
  if (output.scalar_type() == input.scalar_type() && output.numel() % output_times == 0 &&
      output.numel() / output_times * input_times == input.numel()) {
    return;
  }
  fail(Code::kNcclRefused,
       "[rank {}] {} over {} ranks was given {} elements of {} as output and {} of {} as input: output must be {} and "
       "input {} times one chunk, of one dtype.",
       rank_, collective, size_, output.numel(), c10::toString(output.scalar_type()), input.numel(),
       c10::toString(input.scalar_type()), output_times, input_times);
}

Wire NcclCommunicator::wire_of(const at::Tensor& tensor, ncclRedOp_t op) const {
  const bool pairs = tensor.is_complex();
  const auto type = wire_type(pairs ? c10::toRealValueType(tensor.scalar_type()) : tensor.scalar_type());
  if (!type || (pairs && op == ncclMax)) {
    fail(Code::kNcclRefused, "[rank {}] NCCL has no {} of {} tensors. Convert the tensor first.", rank_,
         op == ncclMax ? "maximum" : "sum", c10::toString(tensor.scalar_type()));
  }
  // A sum of truth values is true where any is, which is their largest.
  const bool truth = tensor.scalar_type() == at::kBool;
  return {*type, static_cast<size_t>(tensor.numel()) * (pairs ? 2 : 1), truth ? ncclMax : op};
}

void NcclCommunicator::check(ncclResult_t result, const Flight& flight) const {
  while (result == ncclInProgress && !log_->failed()) {
    std::this_thread::yield();
    result = handle_.async_error();
  }
  if (result == ncclSuccess) return;
  log_->throw_if_failed();
  if (result == ncclRemoteError || result == ncclSystemError) {  // sooner than the watchdog, which will see it too
    throw CollectiveError(coded(
        Code::kReductionFailed,
        fmt::format("[rank {}] NCCL could not start {} on {}: {}. Another rank is probably gone; its own output says "
                    "why. Restart the run, from a checkpoint.",
                    rank_, flight.label(), device_.str(), nccl_reason(result))));
  }
  fail(Code::kReductionFailed,
       "[rank {}] NCCL could not start {} on {}: {}. The other ranks wait for it, so this step cannot finish. Run with "
       "NCCL_DEBUG=INFO to see why.",
       rank_, flight.label(), device_.str(), nccl_reason(result));
}

/// Puts `launch` between the current stream's work so far and whoever waits for the transfer.
template <typename Launch>
TransferPtr NcclCommunicator::issue(const char* collective, std::vector<at::Tensor> tensors, const Launch& launch) {
  const c10::cuda::CUDAGuard guard(device_);
  const CUDAStream current = c10::cuda::getCurrentCUDAStream(device_.index());
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(current, &capture));

  const std::lock_guard alone(calls_);
  log_->throw_if_failed();
  FlightPtr flight = log_->board(collective, bytes);
  if (capture != cudaStreamCaptureStatusNone) {  // its event will say nothing outside of the graph
    log_->forget(flight);
    was_captured_ = true;
  }
  try {
    C10_CUDA_CHECK(cudaEventRecord(fork_, current));
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, fork_));
    check(ncclGroupStart(), *flight);
    const ncclResult_t launched = launch();
    const ncclResult_t grouped = ncclGroupEnd();
    check(launched != ncclSuccess ? launched : grouped, *flight);
    flight->depart(stream_);
  } catch (...) {
    log_->forget(flight);
    throw;
  }
  return std::make_unique<NcclTransfer>(log_, std::move(flight), std::move(tensors), current, stream_);
}

TransferPtr NcclCommunicator::reduce(const char* collective, std::span<const at::Tensor> tensors, ncclRedOp_t op) {
  std::vector<Wire> wires;
  wires.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    admit(collective, tensor, Order::kAny);
    wires.push_back(wire_of(tensor, op));
  }
  return issue(collective, {tensors.begin(), tensors.end()}, [&] {
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < wires.size() && result == ncclSuccess; ++i) {
      void* data = tensors[i].mutable_data_ptr();
      if (wires[i].count == 0) continue;
      result = ncclAllReduce(data, data, wires[i].count, wires[i].type, wires[i].op, handle_.get(), stream_);
    }
    return result;
  });
}

TransferPtr NcclCommunicator::sum(at::Tensor data) {
  if (data.is_sparse()) return sum_sparse(*this, std::move(data));
  return reduce("all-reduce", std::span(&data, 1), ncclSum);
}

TransferPtr NcclCommunicator::broadcast(at::Tensor data, int root) {
  admit("broadcast", data, Order::kAny);
  if (root < 0 || root >= size_)
    fail(Code::kNcclRefused, "[rank {}] broadcast from rank {} of {} ranks.", rank_, root, size_);
  return issue("broadcast", {data}, [&] {
    void* memory = data.mutable_data_ptr();
    return ncclBroadcast(memory, memory, data.nbytes(), ncclUint8, root, handle_.get(), stream_);
  });
}

TransferPtr NcclCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  admit_pair("all-gather", output, size_, input, 1);
  return issue("all-gather", {output, input}, [&] {
    return ncclAllGather(input.const_data_ptr(), output.mutable_data_ptr(), input.nbytes(), ncclUint8, handle_.get(),
                         stream_);
  });
}

TransferPtr NcclCommunicator::all_to_all(at::Tensor output, at::Tensor input) {
  admit_pair("all-to-all", output, size_, input, size_);
  return issue("all-to-all", {output, input}, [&] {
    const size_t chunk = input.nbytes() / static_cast<size_t>(size_);
    const auto* from = static_cast<const char*>(input.const_data_ptr());
    auto* to = static_cast<char*>(output.mutable_data_ptr());
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < size_ && chunk > 0 && result == ncclSuccess; ++peer) {
      const size_t at = static_cast<size_t>(peer) * chunk;
      result = ncclSend(from + at, chunk, ncclUint8, peer, handle_.get(), stream_);
      if (result == ncclSuccess) result = ncclRecv(to + at, chunk, ncclUint8, peer, handle_.get(), stream_);
    }
    return result;
  });
}

TransferPtr NcclCommunicator::reduce_scatter(at::Tensor output, at::Tensor input) {
  admit_pair("reduce-scatter", output, 1, input, size_);
  const Wire wire = wire_of(output, ncclSum);
  return issue("reduce-scatter", {output, input}, [&] {
    return ncclReduceScatter(input.const_data_ptr(), output.mutable_data_ptr(), wire.count, wire.type, wire.op,
                             handle_.get(), stream_);
  });
}

}  // namespace

std::string nccl_version() { return fmt::format("{}.{}.{}", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH); }

std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                     const NcclOptions& options) {
  if (rank < 0 || rank >= size)
    fail(Code::kNcclNotJoined, "rank {} of {} ranks asked for an NCCL communicator.", rank, size);
  if (c10::cuda::device_count() == 0) {
    fail(Code::kNcclNotJoined,
         "[rank {}] an NCCL communicator needs a GPU, and this process sees none. Use gloo for a model on the CPU.",
         rank);
  }
  return std::make_shared<NcclCommunicator>(*store, rank, size, options);
}

}  // namespace lockstep
