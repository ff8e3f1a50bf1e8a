#include "comm/c10d_communicator.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "comm/known_end.h"
#include "comm/sparse_sum.h"
#include "compat.h"
#include "core/error.h"

namespace lockstep {
namespace {

using c10d::ReduceOp;

class C10dTransfer : public Transfer, public KnownEnd {
 public:
  C10dTransfer(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors)
      : work_(std::move(work)), tensors_(std::move(tensors)), on_host_(tensors_.front().is_cpu()) {}

  void wait() override { (void)wait_for(kNoTimeout); }

  bool wait_for(std::chrono::milliseconds patience) override {
    if (!on_host_) patience = kNoTimeout;  // streams wait, and only a timeout would make the host wait too
    const auto start = std::chrono::steady_clock::now();
    try {
      await(patience);
    } catch (const c10::Error&) {
      // c10d raises when its patience ends, which leaves the collective as it was.
      const bool in_time = std::chrono::steady_clock::now() - start < patience;
      if (patience == kNoTimeout || in_time) throw;
      if (!work_->isCompleted()) return false;
      await(kNoTimeout);  // it has ended since: well, or with an error of its own
    }
    tensors_.clear();
    return true;
  }

  bool tell_end(const std::function<void()>& tell) override {
    if (!on_host_) return false;
    try {
      work_->getFuture()->addCallback([tell](c10::ivalue::Future&) { tell(); });
    } catch (const c10::Error&) {  // this backend has none
      return false;
    }
    return true;
  }

  bool lead(const c10::Stream& stream) override {
    if (on_host_) return false;
    const c10::impl::VirtualGuardImpl guard(stream.device_type());
    const c10::Stream before = guard.exchangeStream(stream);
    const bool ended_well = work_->wait(kNoTimeout);  // our tensors stay alive whatever it lets go of
    (void)guard.exchangeStream(before);
    return ended_well;
  }

 protected:
  c10::intrusive_ptr<c10d::Work> work_;

 private:
  void await(std::chrono::milliseconds patience) {
    // A false return means an aborted collective whose data is not what anybody asked for.
    if (work_->wait(patience)) return;
    fail(Code::kAborted, "a collective was aborted before it finished; its result must not be used");
  }

  std::vector<at::Tensor> tensors_;  // groups written in Python need not keep them alive
  bool on_host_;
};

/// A reduction on the host. Groups written in Python may leave the sum in their future instead of in the tensor.
class HostReduction final : public C10dTransfer {
 public:
  HostReduction(c10::intrusive_ptr<c10d::Work> work, at::Tensor data)
      : C10dTransfer(std::move(work), {data}), data_(std::move(data)) {}

  bool wait_for(std::chrono::milliseconds patience) override {
    if (!C10dTransfer::wait_for(patience)) return false;
    adopt_future();
    return true;
  }

 private:
  void adopt_future() {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work_->getFuture();
    } catch (const c10::Error&) {  // this backend has none: the sum is in place
    }
    if (!future || !future->completed() || future->hasError()) return;
    const c10::IValue& value = future->constValue();
    if (value.isNone()) return;
    const at::Tensor sum = c10d::detail::parseCppCommHookResult(value);
    if (!sum.is_sparse() && !sum.is_alias_of(data_)) data_.copy_(sum);
  }

  at::Tensor data_;
};

TransferPtr reduce(c10d::ProcessGroup& group, at::Tensor data, ReduceOp::RedOpType op) {
  std::vector<at::Tensor> tensors{std::move(data)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  auto work = group.allreduce(tensors, options);
  // Never ask for a future on a device: some groups answer by making the current stream wait.
  if (tensors.front().is_cpu()) return std::make_unique<HostReduction>(std::move(work), tensors.front());
  return std::make_unique<C10dTransfer>(std::move(work), std::move(tensors));
}

/// Of the backend that was asked for by name; groups written in Python may not know any.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    if (const auto options = group.getDefaultBackend()->getBackendOptions()) return options->timeout;
  } catch (const std::exception&) {
  }
  return kProcessGroupDefaultTimeout;
}

/// Whether collectives of tensors on `device` are those of the backend of this name.
bool runs_on(std::string_view backend, c10d::ProcessGroup& group, at::Device device) {
  try {
    return group.getBackend(device.type())->getBackendName() == backend;
  } catch (const std::exception&) {  // no backend for this device: the first collective will say so
    return false;
  }
}

// gloo's worker threads write the name of the collective they have finished into one string, without a lock (torch 2.11
// to 2.15). A name of 16 characters and more has memory of its own, which two threads then free twice: heap corruption,
// seconds to hours later. So none of our collectives over gloo may have such a name, neither _ALLREDUCE_SPARSE nor
// _REDUCE_SCATTER_BASE; all others that we use are shorter.
bool has_unsafe_names(c10d::ProcessGroup& group, at::Device device) { return runs_on("gloo", group, device); }

/// What the other ranks have sent is added up when it has arrived.
class SumOfChunks final : public Transfer {
 public:
  SumOfChunks(TransferPtr chunks, at::Tensor received, at::Tensor output)
      : chunks_(std::move(chunks)), received_(std::move(received)), output_(std::move(output)) {}

  void wait() override {
    chunks_->wait();
    add_up();
  }
  bool wait_for(std::chrono::milliseconds patience) override {
    if (!chunks_->wait_for(patience)) return false;
    add_up();
    return true;
  }

 private:
  void add_up() {
    const at::NoGradGuard no_grad;
    at::sum_out(output_, received_, {0});
  }

  TransferPtr chunks_;
  at::Tensor received_;  // [ranks, elements of the output]
  at::Tensor output_;
};

/// All of `tensors`, of one dtype, in one launch.
TransferPtr reduce_list(c10d::ProcessGroup& group, std::span<const at::Tensor> tensors, ReduceOp::RedOpType op) {
  std::vector<at::Tensor> reduced;
  reduced.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) reduced.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = op;
  auto work = group.allreduce_coalesced(reduced, options);
  return std::make_unique<C10dTransfer>(std::move(work), std::move(reduced));
}

std::vector<at::Tensor> chunks(const at::Tensor& data, int count) { return data.view({count, -1}).unbind(0); }

}  // namespace

C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device)
    : group_(std::move(group)),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      timeout_(timeout_of(*group_)),
      groups_(device.is_cuda() && runs_on("nccl", *group_, device)) {}

std::string C10dCommunicator::name() const { return group_->getBackendName(); }

TransferPtr C10dCommunicator::sum(at::Tensor data) {
  // NCCL has no sparse sum, and gloo only one on the host.
  if (data.is_sparse() && (!data.is_cpu() || has_unsafe_names(*group_, data.device()))) {
    return sum_sparse(*this, std::move(data));
  }
  return reduce(*group_, std::move(data), ReduceOp::SUM);
}

TransferPtr C10dCommunicator::sum_all(std::span<const at::Tensor> tensors) {
  if (!groups_ || tensors.size() < 2) return Communicator::sum_all(tensors);
  return reduce_list(*group_, tensors, ReduceOp::SUM);
}

TransferPtr C10dCommunicator::average_all(std::span<const at::Tensor> tensors) {
  if (!groups_) return Communicator::average_all(tensors);
  if (tensors.size() == 1) return reduce(*group_, tensors.front(), ReduceOp::AVG);
  return reduce_list(*group_, tensors, ReduceOp::AVG);
}

std::optional<int64_t> C10dCommunicator::worth_averaging_alone() const {
  // Each tensor of a list costs 20 to 30 us of the host (two H200), in which the device copies about so much.
  constexpr int64_t kBytes = 16 << 20;
  return groups_ ? std::optional(kBytes) : std::nullopt;
}

TransferPtr C10dCommunicator::max(at::Tensor data) { return reduce(*group_, std::move(data), ReduceOp::MAX); }

TransferPtr C10dCommunicator::broadcast(at::Tensor data, int root) {
  std::vector<at::Tensor> tensors{std::move(data)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  auto work = group_->broadcast(tensors, options);
  return std::make_unique<C10dTransfer>(std::move(work), std::move(tensors));
}

TransferPtr C10dCommunicator::all_gather(at::Tensor output, at::Tensor input) {
  std::vector<std::vector<at::Tensor>> outputs{chunks(output, size_)};
  std::vector<at::Tensor> inputs{input.view(-1)};
  auto work = group_->allgather(outputs, inputs);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

TransferPtr C10dCommunicator::all_to_all(at::Tensor output, at::Tensor input) {
  auto work = compat::all_to_all(*group_, output, input);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

TransferPtr C10dCommunicator::reduce_scatter(at::Tensor output, at::Tensor input) {
  if (has_unsafe_names(*group_, output.device())) {  // the same traffic
    at::Tensor received = at::empty({size_, output.numel()}, output.options());
    TransferPtr chunks = all_to_all(received.view(-1), input.view(-1));
    return std::make_unique<SumOfChunks>(std::move(chunks), std::move(received), output.view(-1));
  }
  auto work = compat::reduce_scatter(*group_, output, input);
  return std::make_unique<C10dTransfer>(std::move(work), std::vector<at::Tensor>{output, input});
}

bool lost_a_connection(std::string_view text) {
  // NCCL's words for ncclRemoteError and ncclSystemError, the same in every error that c10d makes of them.
  return text.find("remote process exited or there was a network error") != std::string_view::npos ||
         text.find("unhandled system error") != std::string_view::npos;
}

/// The group is of no use to anybody any more. Without this, c10d's NCCL would keep the device busy until its timeout
/// and then end the process.
bool C10dCommunicator::abort(const std::string& /*report*/) {
  if (!groups_) return false;
  try {
    group_->getBackend(c10::DeviceType::CUDA)->abort();
  } catch (const std::exception&) {  // it is ending by itself
  }
  return true;
}

}  // namespace lockstep
