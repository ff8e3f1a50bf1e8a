#include "reducer/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/agree.h"
#include "core/bucket_planner.h"
#include "core/error.h"
#include "reducer/late_gradients.h"
#include "reducer/messages.h"

namespace lockstep {
namespace {

constexpr uint32_t kNeverComplete = std::numeric_limits<uint32_t>::max();

ParamList checked(ParamList params) {
  if (params.tensors.empty()) {
    fail("DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.");
  }
  return params;
}

BucketPlan first_plan(std::span<const ParamSpec> specs, const ReducerOptions& options, const CommHook& hook) {
  return BucketPlan(specs, group_by_registration(specs, options.first_limits), hook.slot_alignment());
}

/// The same groups in the same order, with other gaps between the slots.
BucketPlan realigned(const BucketPlan& plan, std::span<const ParamSpec> specs, int64_t alignment) {
  std::vector<BucketGroup> groups;
  for (const Bucket& bucket : plan.buckets()) groups.push_back({bucket.params, bucket.limit_bytes});
  return BucketPlan(specs, std::move(groups), alignment);
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                                         std::unique_ptr<CommHook> hook) {
  return std::shared_ptr<Reducer>(
      new Reducer(checked(std::move(params)), std::move(comm), std::move(options), std::move(hook)));
}

Reducer::Reducer(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                 std::unique_ptr<CommHook> hook)
    : params_(std::move(params)),
      specs_(specs_of(params_)),
      comm_(std::move(comm)),
      options_(std::move(options)),
      hook_(std::move(hook)),
      buffers_(params_, options_.placement, first_plan(specs_, options_, *hook_)),
      tracker_(buffers_.plan()),
      usage_(params_.size()),
      expected_(params_.size(), 1),
      counted_(params_.size(), 0),
      hooks_(params_.tensors, *this) {
  arrival_.reserve(params_.size());
}

Reducer::~Reducer() = default;

// ---- between steps ----

bool Reducer::begin_step() {
  const std::lock_guard lock(mutex_);
  raise_if_unfinished();
  if (phase_ == Phase::kCollecting || phase_ == Phase::kPartial) recover();
  times_.forward_start = StepTimes::now();
  return adopt_waiting_plan();
}

void Reducer::expect_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kIdle) phase_ = Phase::kArmed;
  watch_outputs(outputs, weak_from_this());
}

void Reducer::set_hook(std::unique_ptr<CommHook> hook) {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kCollecting || phase_ == Phase::kPartial) {
    fail("[rank {}] the comm hook cannot be replaced while a backward pass is being reduced. Do it between steps.",
         comm_->rank());
  }
  hook_ = std::move(hook);
  adopt_plan(realigned(buffers_.plan(), specs_, hook_->slot_alignment()));
}

void Reducer::set_static_graph() {
  const std::lock_guard lock(mutex_);
  if (num_reductions_ != 0 || phase_ == Phase::kCollecting || phase_ == Phase::kPartial) {
    fail(
        "[rank {}] set_static_graph() should be called before training loop starts, but {} synchronised backward "
        "passes have taken place. Pass static_graph=True to the constructor.",
        comm_->rank(), num_reductions_);
  }
  options_.graph = GraphKind::kStatic;
}

void Reducer::check_finished() {
  const std::lock_guard lock(mutex_);
  raise_if_unfinished();
}

void Reducer::detach() {
  const std::lock_guard lock(mutex_);
  hooks_.remove();
}

void Reducer::raise_if_unfinished() {
  if (phase_ != Phase::kPartial || tracker_->missing().empty()) return;
  throw Error(messages::unfinished(comm_->rank(), params_, tracker_->missing(), options_.graph));
}

void Reducer::adopt_plan(BucketPlan plan) {
  buffers_.adopt(std::move(plan));
  tracker_.emplace(buffers_.plan());
  hook_->on_new_plan();
}

bool Reducer::adopt_waiting_plan() {
  if (plan_state_ != PlanState::kOrderKnown) return false;
  // The order of rank 0 counts: ranks may have seen different ones, and the plan must be the same everywhere.
  std::vector<int32_t> order;
  for (const ParamId id : last_arrival_) order.push_back(static_cast<int32_t>(index(id)));
  adopt_from_rank_zero(*comm_, order, params_.tensors.front().device());
  std::vector<ParamId> arrival;
  for (const int32_t i : order) arrival.push_back(param_id(static_cast<size_t>(i)));
  adopt_plan(BucketPlan(specs_, group_by_arrival(specs_, arrival, options_.limits), hook_->slot_alignment()));
  plan_state_ = PlanState::kFinal;
  return true;
}

// ---- while backward runs ----

void Reducer::on_output_reached() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kCollecting) return open(Opening::kOutput);
  if (opening_ == Opening::kOutput && closing_backward_ == current_backward()) return;
  opening_ = Opening::kOutput;
  hook_end_of_backward();
}

void Reducer::on_grad_ready(ParamId id) {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kArmed || phase_ == Phase::kPartial) open(Opening::kGradient);
  if (phase_ == Phase::kCollecting && arrivals_++ == 0) send(unawaited_);
  if (options_.graph != GraphKind::kComplete && params_.tensors[index(id)].grad().defined()) usage_.mark_used(id);
  if (phase_ == Phase::kIdle) return;
  collect(id);
  }

void Reducer::open(Opening opening) {
  opening_ = opening;
  before_ = std::exchange(phase_, Phase::kCollecting);
  hook_end_of_backward();
  if (before_ == Phase::kPartial) return;  // the same pass goes on
  times_.backward_compute_start = StepTimes::now();
  arrivals_ = 0;
  arrival_.clear();
  in_flight_.clear();
  if (records_firings()) {
    std::fill(counted_.begin(), counted_.end(), 0);
    std::fill(expected_.begin(), expected_.end(), kNeverComplete);
  } else if (options_.graph == GraphKind::kDynamic) {
    usage_.expect(params_, expected_);
  } else if (options_.graph == GraphKind::kStatic) {
    expected_ = *firings_;
  }
  unawaited_ = tracker_->begin(expected_);
}

void Reducer::hook_end_of_backward() {
  closing_backward_ = current_backward();
  at_end_of_backward([self = weak_from_this(), backward = closing_backward_] {
    const auto reducer = std::static_pointer_cast<Reducer>(self.lock());
    if (!reducer) return;
    const std::lock_guard lock(reducer->mutex_);
    reducer->on_backward_ended(backward);
  });
}

void Reducer::collect(ParamId id) {
  if (records_firings()) {
    ++counted_[index(id)];
    return;
  }
  if (tracker_->complete(id)) return reject(id);
  const BucketRange ready = tracker_->mark_ready(id);
  if (tracker_->complete(id)) arrival_.push_back(id);
  send(ready);
}

/// A report beyond those announced.
void Reducer::reject(ParamId id) {
  if (specs_[index(id)].numel == 0) return;
  if (options_.graph == GraphKind::kDynamic && expected_[index(id)] == 0) {
    if (tracker_->has_left(id)) usage_.mark_late(id);
    return;
  }
  phase_ = Phase::kPartial;
  throw Error(messages::ready_twice(comm_->rank(), params_, id, options_.graph));
}

/// Runs `step` and adds to its error which bucket of which rank it was about. Other kinds of exception, such as those
/// of hooks written in Python, keep their type and text.
template <typename Step>
auto Reducer::naming(BucketId id, const Step& step) {
  const auto where = [&] {
    return fmt::format("[rank {}] while reducing {}", comm_->rank(), messages::bucket(buffers_.plan(), id, params_));
  };
  try {
    return step();
  } catch (c10::Error& error) {
    error.add_context(where());
    throw;
  } catch (const std::runtime_error& error) {
    fail("{}: {}", where(), error.what());
  }
}

void Reducer::send(BucketRange range) {
  for (size_t b = range.first; b < range.last; ++b) send_bucket(bucket_id(b));
}

void Reducer::send_bucket(BucketId id) {
  buffers_.absorb(id, hook_->input() == CommHook::Input::kSummand ? scale() : 1.0,
                  options_.graph == GraphKind::kComplete ? GradBuffers::PresenceOf()
                                                         : [this](ParamId param) { return presence(param); });
  const Bucket& bucket = buffers_.plan().bucket(id);
  if (bucket.numel == 0 && !bucket.sparse) return;
  if (in_flight_.empty()) times_.communication_start = StepTimes::now();
  naming(id, [&] { in_flight_.push_back({id, hook_->start(buffers_.lend(id), *comm_)}); });
}

GradBuffers::Presence Reducer::presence(ParamId id) const {
  if (usage_.used_here(id)) return GradBuffers::Presence::kInside;
  // Another thread may be writing this gradient right now: it counts when it is reported, as a late one.
  const bool presumed_unused = options_.graph == GraphKind::kDynamic && expected_[index(id)] == 0;
  if (presumed_unused && specs_[index(id)].numel != 0) return GradBuffers::Presence::kAbsent;
  // It may turn out to be used nowhere, and must then be what it was.
  return GradBuffers::Presence::kOutside;
}

double Reducer::scale() const { return 1.0 / comm_->size(); }

// ---- at the end of backward ----

void Reducer::on_backward_ended(int backward) {
  if (phase_ != Phase::kCollecting || backward != closing_backward_) return;
  times_.backward_compute_end = StepTimes::now();
  if (arrivals_ == 0) {  // somebody asked for the gradient of an input, say
    phase_ = before_;
    return;
  }
  const bool may_stop_waiting =
      opening_ == Opening::kOutput && (records_firings() || options_.graph == GraphKind::kDynamic);
  if (!tracker_->all_left() && !may_stop_waiting) {
    phase_ = Phase::kPartial;
    return;
  }
  finish();
}

void Reducer::finish() {
  send(tracker_->finish());
  if (exchanges_usage()) exchange_usage();
  std::reverse(in_flight_.begin(), in_flight_.end());  // taken from the back
  while (!in_flight_.empty()) {
    const InFlight next = std::move(in_flight_.back());
    in_flight_.pop_back();
    publish(next.bucket, naming(next.bucket, [&] { return next.mean->wait(); }));
  }
  times_.communication_end = StepTimes::now();
  learn_from_pass();
  ++num_reductions_;
  last_times_ = times_;
  phase_ = Phase::kIdle;
}

void Reducer::exchange_usage() {
  usage_.start_exchange(*comm_, params_.tensors.front().device());
  usage_.finish_exchange();
}

void Reducer::publish(BucketId id, const at::Tensor& mean) {
  if (options_.graph == GraphKind::kComplete) return buffers_.publish(id, mean, nullptr);
  if (options_.graph == GraphKind::kDynamic && usage_.anyone_late()) {
    add_late_gradients(buffers_, id, params_, usage_, scale(), *comm_, mean);
  }
  buffers_.publish(id, mean, [this](ParamId param) { return !usage_.used_anywhere(param); });
}

void Reducer::learn_from_pass() {
  const bool complete_order = !records_firings() && options_.graph != GraphKind::kDynamic;
  if (complete_order) {
    // Parameters that never report (unused in a static graph, or without elements) come last.
    std::vector<bool> arrived(params_.size(), false);
    for (const ParamId id : arrival_) arrived[index(id)] = true;
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (!arrived[i]) arrival_.push_back(param_id(i));
    }
    if (plan_state_ == PlanState::kProvisional) plan_state_ = PlanState::kOrderKnown;
  }
  if (records_firings()) firings_ = counted_;
  last_arrival_.assign(arrival_.begin(), arrival_.end());
  usage_.end_step();
}

/// A backward threw before its end. The other ranks may be waiting for every bucket of this step, so those that have
/// not left go out now, filled with NaN: the ranks stay in step, and none can take a mean without us for the truth.
void Reducer::recover() {
  const BucketRange rest = tracker_->finish();
  for (size_t b = rest.first; b < rest.last; ++b) {
    const BucketId id = bucket_id(b);
    if (buffers_.plan().bucket(id).numel == 0) continue;
    try {
      GradBucket poisoned = buffers_.lend(id);
      poisoned.memory = at::full_like(poisoned.memory, std::numeric_limits<double>::quiet_NaN());
      in_flight_.push_back({id, hook_->start(poisoned, *comm_)});
    } catch (const std::exception&) {  // the cause of the failure strikes again; it has been reported
    }
  }
  for (InFlight& transfer : in_flight_) {
    try {
      (void)transfer.mean->wait();
    } catch (const std::exception&) {
    }
  }
  in_flight_.clear();
  try {
    if (exchanges_usage() && !usage_.exchange_started()) exchange_usage();
  } catch (const std::exception&) {
  }
  usage_.end_step();
  phase_ = Phase::kIdle;
}

// ---- what is going on ----

std::vector<std::vector<size_t>> Reducer::bucket_params() {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<size_t>> result;
  for (const Bucket& bucket : buffers_.plan().buckets()) {
    auto& members = result.emplace_back();
    for (const ParamId id : bucket.params) members.push_back(index(id));
  }
  return result;
}

std::vector<int64_t> Reducer::bucket_payload_bytes() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> result;
  for (const Bucket& bucket : buffers_.plan().buckets()) {
    result.push_back(bucket.payload_numel * specs_[index(bucket.params.front())].element_size);
  }
  return result;
}

std::vector<size_t> Reducer::arrival_order() {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> result;
  for (const ParamId id : last_arrival_) result.push_back(index(id));
  return result;
}

bool Reducer::has_final_plan() {
  const std::lock_guard lock(mutex_);
  return plan_state_ == PlanState::kFinal;
}

at::Tensor Reducer::used_map() {
  const std::lock_guard lock(mutex_);
  return usage_.map(params_.tensors.front().device());
}

int64_t Reducer::unused_bytes() {
  const std::lock_guard lock(mutex_);
  if (options_.graph == GraphKind::kComplete || num_reductions_ == 0) return 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!usage_.used_anywhere(param_id(i))) bytes += specs_[i].numel * specs_[i].element_size;
  }
  return bytes;
}

StepTimes Reducer::last_step_times() {
  const std::lock_guard lock(mutex_);
  return last_times_;
}

int64_t Reducer::num_reductions() {
  const std::lock_guard lock(mutex_);
  return num_reductions_;
}

}  // namespace lockstep
