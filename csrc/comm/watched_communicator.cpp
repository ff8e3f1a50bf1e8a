#include "comm/watched_communicator.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

#include "comm/c10d_communicator.h"
#include "comm/known_end.h"
#include "core/error.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPatience{100};

enum class During { kStart, kWait };

/// Runs `call`, and has the monitor, if there is one, explain its failure. What fails at its start is usually this
/// rank's own affair; what fails later is not.
template <typename Call>
void explaining(Monitor* monitor, During during, const Call& call) {
  if (monitor == nullptr) return call();
  const bool starts = during == During::kStart;
  try {
    call();
  } catch (const CollectiveError& error) {
    const std::string_view what = error.what();
    const std::string_view plain = uncoded(what);
    const Monitor::Cause cause = cause_of(*monitor, error.what(), /*lost=*/true);
    if (cause.found) throw PeerError(fmt::format("{} {}", plain, cause.text));
    throw Error(fmt::format("{} {}{}", plain, uncoded(cause.text), what.substr(plain.size())));
  } catch (const Error&) {
    if (starts) monitor->raise_if_lost();  // it was the monitor that ended it
    throw;
  } catch (c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const bool lost = lost_a_connection(text);
    if (starts) monitor->raise_if_lost();
    if (starts && !lost) throw;
    error.add_context(cause_of(*monitor, text, lost).text);
    throw;
  } catch (const std::runtime_error& error) {  // gloo's own kind; hooks written in Python raise others
    const bool lost = lost_a_connection(error.what());
    if (starts) monitor->raise_if_lost();
    if (starts && !lost) throw;
    throw PeerError(fmt::format("{} {}", error.what(), cause_of(*monitor, error.what(), lost).text));
  }
}

class WatchedTransfer final : public Transfer, public KnownEnd {
 public:
  WatchedTransfer(TransferPtr inner, std::shared_ptr<Monitor> monitor)
      : inner_(std::move(inner)), monitor_(std::move(monitor)) {}

  void wait() override {
    explaining(monitor_.get(), During::kWait, [this] {
      while (!inner_->wait_for(kPatience)) monitor_->raise_if_hopeless();
    });
  }
  bool wait_for(std::chrono::milliseconds patience) override { return inner_->wait_for(patience); }
  bool tell_end(const std::function<void()>& tell) override {
    auto* known = dynamic_cast<KnownEnd*>(inner_.get());
    return known != nullptr && known->tell_end(tell);
  }
  bool lead(const c10::Stream& stream) override {
    auto* known = dynamic_cast<KnownEnd*>(inner_.get());
    return known != nullptr && known->lead(stream);
  }

 private:
  TransferPtr inner_;
  std::shared_ptr<Monitor> monitor_;
};

class WatchedCommunicator final : public Communicator {
 public:
  WatchedCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<Monitor> monitor, MakeOwn make_own)
      : inner_(std::move(inner)), monitor_(std::move(monitor)), make_own_(std::move(make_own)) {
    tell_monitor();
  }

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }

  TransferPtr sum(at::Tensor data) override {
    return start([&] { return inner_->sum(std::move(data)); });
  }
  TransferPtr sum_all(std::span<const at::Tensor> tensors) override {
    return start([&] { return inner_->sum_all(tensors); });
  }
  TransferPtr average_all(std::span<const at::Tensor> tensors) override {
    return start([&] { return inner_->average_all(tensors); });
  }
  [[nodiscard]] std::optional<int64_t> worth_averaging_alone() const override {
    return inner_->worth_averaging_alone();
  }
  TransferPtr max(at::Tensor data) override {
    return start([&] { return inner_->max(std::move(data)); });
  }
  TransferPtr average(at::Tensor data) override {
    return start([&] { return inner_->average(std::move(data)); });
  }
  TransferPtr broadcast(at::Tensor data, int root) override {
    return start([&] { return inner_->broadcast(std::move(data), root); });
  }
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override {
    return start([&] { return inner_->all_gather(std::move(output), std::move(input)); });
  }
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override {
    return start([&] { return inner_->all_to_all(std::move(output), std::move(input)); });
  }
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override {
    return start([&] { return inner_->reduce_scatter(std::move(output), std::move(input)); });
  }
  bool abort(const std::string& report) override { return inner_->abort(report); }
  void isolate() override {
    if (!make_own_) return;
    explaining(monitor_.get(), During::kWait, [this] {
      if (auto own = make_own_()) inner_ = std::move(own);
      tell_monitor();
    });
    make_own_ = nullptr;
  }
  void outwait(const std::function<bool(std::chrono::milliseconds)>& wait_for) override {
    explaining(monitor_.get(), During::kWait, [&] {
      Communicator::outwait([&](std::chrono::milliseconds patience) {
        const bool done = wait_for(patience);
        if (!done && monitor_) monitor_->raise_if_hopeless();
        return done;
      });
    });
  }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  [[nodiscard]] std::shared_ptr<Monitor> monitor() const override { return monitor_; }

 private:
  void tell_monitor() {
    if (!monitor_) return;
    monitor_->set_abort([inner = std::weak_ptr(inner_)](const std::string& report) {
      const auto alive = inner.lock();
      return alive && alive->abort(report);
    });
  }

  template <typename Start>
  TransferPtr start(const Start& call) {
    if (!monitor_) return call();
    TransferPtr transfer;
    explaining(monitor_.get(), During::kStart, [&] {
      const Monitor::Call in_call(*monitor_, "the start of a collective");
      transfer = call();
    });
    return std::make_unique<WatchedTransfer>(std::move(transfer), monitor_);
  }

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<Monitor> monitor_;
  MakeOwn make_own_;
};

}  // namespace

Monitor::Cause cause_of(Monitor& monitor, const std::string& text, bool lost) {
  if (lost) monitor.give_up(text);
  Monitor::Cause cause = monitor.explain_failure(text);
  if (lost && cause.found) monitor.give_up(cause.text);
  return cause;
}

std::shared_ptr<Communicator> watched(std::shared_ptr<Communicator> inner, std::shared_ptr<Monitor> monitor,
                                      MakeOwn make_own) {
  if (!monitor && !make_own) return inner;
  return std::make_shared<WatchedCommunicator>(std::move(inner), std::move(monitor), std::move(make_own));
}

std::shared_ptr<Communicator> make_watched_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                        const std::shared_ptr<Progress>& progress, at::Device device,
                                                        const WatchOptions& options) {
  auto inner = std::make_shared<C10dCommunicator>(group, device);
  if (inner->size() == 1) return inner;
  std::shared_ptr<Monitor> monitor;
  if (options.threshold.count() > 0) {
    if (const auto store = monitor_store(group->getStore(), group->getGroupName(), inner->rank())) {
      monitor = std::make_shared<Monitor>(store, inner->rank(), inner->size(), progress, options.threshold);
    }
  }
  return watched(inner, std::move(monitor),
                 [=] { return make_own_communicator(group, options.kind, device, options.nccl); });
}

}  // namespace lockstep
