#include "python/python_hook.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "comm/c10d_communicator.h"
#include "comm/monitor.h"
#include "comm/watched_communicator.h"
#include "core/error.h"

namespace lockstep::python {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// Lets a thread wait for a future for a while, which the future itself does not offer.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  bool wait_for(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return opened_.wait_for(lock, patience, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

/// Whether an error that reaches us through Python as a mere text was raised by a process group's backend.
bool comes_from_the_wire(const std::string& text) {
  return text.find("gloo/") != std::string::npos || text.find("NCCL") != std::string::npos ||
         text.find("[c10d]") != std::string::npos;
}

class PendingFuture final : public PendingMean {
 public:
  PendingFuture(FuturePtr future, at::Tensor memory, std::string where, Communicator& comm,
                std::shared_ptr<CallbackOrder> order)
      : future_(std::move(future)),
        memory_(std::move(memory)),
        where_(std::move(where)),
        comm_(&comm),
        order_(std::move(order)) {
    future_->addCallback([gate = gate_](c10::ivalue::Future&) { gate->open(); }, /*uses_future=*/false);
  }

  [[nodiscard]] const std::shared_ptr<Gate>& gate() const { return gate_; }

  at::Tensor wait() override {
    await();  // for a device: the current stream waits
    at::Tensor mean = tensor_of(future_->value());
    future_.reset();
    if (memory_.layout() != at::kStrided) return mean;
    if (mean.numel() != memory_.numel() || mean.device() != memory_.device()) {
      fail(Code::kHookResult,
           "{} returned a tensor with {} elements on {}; the bucket has {} on {}. Return the mean of bucket.buffer().",
           where_, mean.numel(), mean.device().str(), memory_.numel(), memory_.device().str());
    }
    // Hooks may answer in another dtype, as torch's compression wrappers do.
    return mean.to(memory_.scalar_type()).contiguous().view(-1);
  }

 private:
  void await() {
    try {
      comm_->outwait([this](std::chrono::milliseconds patience) {
        if (!gate_->wait_for(patience)) return false;
        // Inside, so that the monitor is asked for the cause; what the hook itself did wrong has none elsewhere.
        if (future_->hasError() && comes_from_the_wire(future_->tryRetrieveErrorMessage())) future_->waitAndThrow();
        return true;
      });
      order_->on_done();
      future_->waitAndThrow();
    } catch (const PeerError&) {
      throw;
    } catch (const c10::Error& error) {
      fail(Code::kReductionFailed, "{} failed: {}", where_, error.what_without_backtrace());
    } catch (const std::runtime_error& error) {
      fail(Code::kReductionFailed, "{} failed: {}", where_, error.what());
    }
  }

  at::Tensor tensor_of(const c10::IValue& value) const {
    if (value.isTensor()) return value.toTensor();
    if (value.isTensorList() && value.toTensorList().size() == 1) return value.toTensorVector().front();
    if (value.isPyObject()) {
      std::vector<at::Tensor> tensors = value.toPyObjectHolder()->extractTensors();
      if (tensors.size() == 1) return std::move(tensors.front());
    }
    fail(Code::kHookResult,
         "{} returned a future whose value is not one tensor. Finish it with the mean of bucket.buffer().", where_);
  }

  FuturePtr future_;
  at::Tensor memory_;
  std::string where_;
  Communicator* comm_;
  std::shared_ptr<CallbackOrder> order_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

/// The bucket as torch's hooks know it. Refers to the memory of `bucket.members()`.
c10d::GradBucket as_torch_bucket(const GradBucket& bucket) {
  const BucketMembers& members = bucket.members();
  const std::vector<c10::IntArrayRef> sizes(members.sizes.begin(), members.sizes.end());
  return c10d::GradBucket(index(bucket.id), bucket.count, bucket.memory, members.offsets, members.lengths, sizes,
                          members.params, std::nullopt);
}

class PythonHook final : public CommHook {
 public:
  PythonHook(py::object state, py::object hook, std::string name, std::vector<CallbackOrder::Group> groups)
      : state_(std::move(state)),
        hook_(std::move(hook)),
        name_(std::move(name)),
        order_(std::make_shared<CallbackOrder>(std::move(groups))) {}

  ~PythonHook() override {
    const py::gil_scoped_acquire gil;
    state_ = py::object();
    hook_ = py::object();
  }

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] int64_t slot_alignment() const override { return 1; }
  [[nodiscard]] bool communicates_later() const override { return order_->one_at_a_time(); }
  void on_pass_ended() override {
    order_->on_pass_ended();
    last_.reset();  // it was awaited, or given up
  }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    std::string where = fmt::format("the comm hook '{}', called for {},", name_, bucket.describe());
    const bool on_host = bucket.memory.is_cpu();
    if (on_host && order_->one_at_a_time()) await_last(comm);
    const auto monitor = comm.monitor();
    const py::gil_scoped_acquire gil;
    if (on_host) order_->on_starting();
    py::object result;
    try {
      std::optional<Monitor::Call> in_call;
      if (monitor) in_call.emplace(*monitor, "its comm hook");
      result = hook_(state_, as_torch_bucket(bucket));
    } catch (py::error_already_set& error) {
      if (py::hasattr(error.value(), "add_note")) {
        error.value().attr("add_note")("in " + where + " of lockstep" + cause_elsewhere(py::str(error.value()), comm));
      }
      throw;
    }
    // torch.futures.Future, or the class that it extends.
    if (!py::isinstance<torch::jit::PythonFutureWrapper>(result)) {
      fail(Code::kHookResult, "{} returned {}: callback must return a torch.futures.Future object, but got {}", where,
           std::string(py::str(result)).substr(0, 100), std::string(py::str(py::type::of(result))));
    }
    if (on_host) order_->on_started();
    auto future = result.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
    auto pending = std::make_unique<PendingFuture>(std::move(future), bucket.memory, std::move(where), comm, order_);
    last_ = pending->gate();
    return pending;
  }

 private:
  void await_last(Communicator& comm) {
    if (!last_) return;
    comm.outwait([this](std::chrono::milliseconds patience) { return last_->wait_for(patience); });
    order_->on_done();
    last_.reset();
  }

  /// Why a collective that the hook waited for has failed, as far as the monitor knows; may take seconds.
  static std::string cause_elsewhere(const std::string& text, const Communicator& comm) {
    const auto monitor = comm.monitor();
    if (!monitor || !comes_from_the_wire(text)) return "";
    const py::gil_scoped_release no_gil;
    return ". " + cause_of(*monitor, text, lost_a_connection(text)).text;
  }

  py::object state_;
  py::object hook_;
  std::string name_;
  std::shared_ptr<CallbackOrder> order_;
  std::shared_ptr<Gate> last_;  // of the bucket before
};

}  // namespace

std::unique_ptr<CommHook> make_python_hook(py::object state, py::object hook, std::string name,
                                           std::vector<CallbackOrder::Group> groups) {
  return std::make_unique<PythonHook>(std::move(state), std::move(hook), std::move(name), std::move(groups));
}

}  // namespace lockstep::python
