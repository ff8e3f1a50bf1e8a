// What the reducer does between steps: construction, new plans and hooks, other sets of ranks, explicit reductions.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "comm/agree.h"
#include "core/bucket_planner.h"
#include "core/clock.h"
#include "core/error.h"
#include "reducer/late_gradients.h"
#include "reducer/messages.h"
#include "reducer/reducer.h"

namespace lockstep {
namespace {

constexpr const char* kSearchEvent = "torch.distributed.ddp.reducer::search_unused_parameters";

ParamList checked(ParamList params) {
  if (params.tensors.empty()) {
    fail(Code::kNoParameters,
         "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.");
  }
  return params;
}

BucketPlan first_plan(std::span<const ParamSpec> specs, const ReducerOptions& options, const CommHook& hook) {
  return BucketPlan(specs, group_by_registration(specs, options.first_limits), hook.slot_alignment());
}

GradBuffers::WireType wire_type(const CommHook& hook, int ranks) {
  return [&hook, ranks](at::ScalarType grads, bool complex) {
    return hook.wire_type({.dtype = grads, .complex = complex, .ranks = ranks});
  };
}

/// The same groups in the same order, with other gaps between the slots.
BucketPlan realigned(const BucketPlan& plan, std::span<const ParamSpec> specs, int64_t alignment) {
  std::vector<BucketGroup> groups;
  for (const Bucket& bucket : plan.buckets()) groups.push_back({bucket.params, bucket.limit_bytes});
  return BucketPlan(specs, std::move(groups), alignment);
}

/// Reduces as another kind of graph, without leaving buckets out, until the end of the scope.
class ScopedOptions {
 public:
  ScopedOptions(ReducerOptions& options, GraphKind graph)
      : options_(options), graph_(options.graph), skip_(options.skip_unused_buckets) {
    options_.graph = graph;
    options_.skip_unused_buckets = false;
  }
  ~ScopedOptions() {
    options_.graph = graph_;
    options_.skip_unused_buckets = skip_;
  }
  ScopedOptions(const ScopedOptions&) = delete;
  ScopedOptions& operator=(const ScopedOptions&) = delete;

 private:
  ReducerOptions& options_;
  GraphKind graph_;
  bool skip_;
};

}  // namespace

std::shared_ptr<Reducer> Reducer::create(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                                         std::unique_ptr<CommHook> hook, std::shared_ptr<Progress> progress) {
  return std::shared_ptr<Reducer>(new Reducer(checked(std::move(params)), std::move(comm), std::move(options),
                                              std::move(hook), std::move(progress)));
}

Reducer::Reducer(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                 std::unique_ptr<CommHook> hook, std::shared_ptr<Progress> progress)
    : params_(std::move(params)),
      specs_(specs_of(params_)),
      comm_(std::move(comm)),
      options_(std::move(options)),
      hook_(std::move(hook)),
      buffers_(params_, options_.placement, options_.lifetime, first_plan(specs_, options_, *hook_),
               wire_type(*hook_, comm_->size())),
      tracker_(buffers_.plan()),
      usage_(params_.size()),
      progress_(std::move(progress)),
      expected_(params_.size(), 1),
      counted_(params_.size(), 0),
      hooks_(params_.tensors, *this) {
  arrival_.reserve(params_.size());
  describe_plan();
  if (reduces_in_place()) realign();
}

Reducer::~Reducer() = default;

bool Reducer::begin_step() {
  const std::lock_guard lock(mutex_);
  raise_if_lost();
  raise_if_unfinished();
  if (in_pass()) recover();
  check_frozen();
  times_.forward_start = steady_ns();
  if (records()) recording_.begin_forward();
  weight_.begin_forward(params_);
  progress_->next_step();
  ++forwards_;
  const bool adopted = adopt_waiting_plan();
  progress_->enter(Stage::kForward);
  return adopted;
}

void Reducer::expect_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kIdle || phase_ == Phase::kAccumulating) phase_ = Phase::kArmed;
  std::optional<at::RecordFunction> event;  // what stands here for torch's search has its name in profiles
  if (options_.graph == GraphKind::kDynamic) event.emplace(at::RecordScope::FUNCTION);
  if (event && event->isActive()) event->before(kSearchEvent);
  watch_outputs(outputs, weak_from_this());
  outputs_.add(outputs);
  progress_->enter(Stage::kBeforeBackward);
}

void Reducer::expect_local_backward() {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::kIdle) phase_ = Phase::kAccumulating;
  progress_->enter(Stage::kBeforeBackward);
}

void Reducer::note_sync_switch(bool reduces) {
  const std::lock_guard lock(mutex_);
  switch_reduces_ = reduces;
}

void Reducer::expect_unused(std::span<const ParamId> ids) {
  const std::lock_guard lock(mutex_);
  if (usage_reading() == Reading::kLater) return;
  for (const ParamId id : ids) usage_.hint_unused(id);
}

void Reducer::watch_frozen(const ParamList& frozen) {
  const std::lock_guard lock(mutex_);
  frozen_.clear();
  for (const at::Tensor& tensor : frozen.tensors) frozen_.emplace_back(tensor.getIntrusivePtr());
  frozen_names_ = frozen.names;
}

void Reducer::sync_gradients() {
  const std::lock_guard lock(mutex_);
  raise_if_unfinished();
  if (phase_ != Phase::kIdle && phase_ != Phase::kAccumulating) {
    raise(
        Code::kSyncDuringPass,
        "sync_gradients() was called while a backward is expected or running, which will reduce the gradients itself. "
        "Call it after forwards and backwards under no_sync().");
  }
  // Which gradients exist may differ between ranks: as in a graph of kind kDynamic, in which everything has arrived.
  const ScopedOptions as_dynamic(options_, GraphKind::kDynamic);
  std::fill(expected_.begin(), expected_.end(), 1);
  arrival_.clear();
  forget_transfers();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_.tensors[i].grad().defined()) usage_.mark_used(param_id(i));
  }
  num_handled_ = 0;
  (void)tracker_->begin(expected_);
  if (records()) recording_.begin_backward(buffers_.plan());
  divisor_ = live_ranks_ ? live_ranks_() : comm_->size();
  phase_ = Phase::kCollecting;
  try {
    start_guard(false);
    send(tracker_->finish());
    num_sent_ = in_flight_.size();
    finish();
  } catch (...) {
    recover_under_these_options();
    throw;
  }
}

/// At the next forward the options would be others. What the ranks find out about each other here is the failure that
/// is being reported, or is found again.
void Reducer::recover_under_these_options() {
  if (phase_ != Phase::kCollecting || !unusable_.empty()) return;
  try {
    recover();
  } catch (const std::exception&) {
  }
}

void Reducer::set_step_weight(std::optional<double> weight) {
  const std::lock_guard lock(mutex_);
  check_between_steps("the weight of a step cannot be set");
  if (weight && !options_.guards) {
    raise(Code::kReductionFailed,
          "set_step_weight() needs the guards, by which the weights travel to the other ranks. Construct without "
          "guards=False.");
  }
  weight_.set(weight);
}

void Reducer::set_static_graph() {
  const std::lock_guard lock(mutex_);
  if (num_reductions_ != 0 || in_pass()) {
    raise(Code::kStaticGraphTooLate,
          fmt::format("set_static_graph() should be called before training loop starts, but {} synchronised backward "
                      "passes have taken place. Pass static_graph=True to the constructor.",
                      num_reductions_));
  }
  options_.graph = GraphKind::kStatic;
}

void Reducer::check_finished() {
  const std::lock_guard lock(mutex_);
  raise_if_unfinished();
}

void Reducer::finish_failed_pass() {
  const std::lock_guard lock(mutex_);
  raise_if_unfinished();
  if (in_pass()) recover();
}

void Reducer::detach() {
  const std::lock_guard lock(mutex_);
  hooks_.remove();
}

void Reducer::raise_if_unfinished() {
  if (!unusable_.empty()) {
    raise(
        Code::kGroupUnusable,
        fmt::format("the collectives of the ranks no longer match since an earlier error, so that nothing more can be "
                    "reduced over this process group. Restart the job, or wrap the module again with a new group. "
                    "The earlier error: {}",
                    unusable_));
  }
  if (phase_ == Phase::kReduced) {
    raise(Code::kNotFinalized,
          "Expected to have finalized the prior backward pass before a new forward. Call "
          "finalize_backward() after each synchronised backward, or set "
          "require_manual_backward_finalization = False.");
  }
  if (phase_ != Phase::kPartial || tracker_->missing().empty()) return;
  std::string text =
      messages::unfinished(comm_->rank(), params_, tracker_->missing(), options_.graph, missing_because_);
  if (finalization_ == Finalization::kManual) {
    text += " finalize_backward() cannot finalize a pass that lacks gradients.";
  }
  raise(Code::kUnfinished, text);
}

void Reducer::set_manual_finalization(bool required) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kIdle && phase_ != Phase::kAccumulating) {
    raise(Code::kManualTooLate,
          "require_manual_backward_finalization cannot be called after forward while a backward "
          "pass is expected. Set it between steps.");
  }
  finalization_ = required ? Finalization::kManual : Finalization::kAutomatic;
}

bool Reducer::should_finalize_after_backward() {
  const std::lock_guard lock(mutex_);
  return options_.graph != GraphKind::kDynamic && plan_state_ == PlanState::kProvisional;
}

void Reducer::finalize_by_hand() {
  const std::lock_guard lock(mutex_);
  if (finalization_ != Finalization::kManual) {
    raise(Code::kFinalizeRefused,
          "finalize_backward() was called, but manual backward finalization is not required. Set "
          "require_manual_backward_finalization = True before forward.");
  }
  if (phase_ == Phase::kCollecting || phase_ == Phase::kPartial) {
    raise(Code::kFinalizeRefused,
          fmt::format("finalize_backward() was called before all DDP buckets were ready. next_bucket_={} "
                      "buckets_.size()={}. Missing parameters: {} of {}. Call it after the backward that brings them.",
                      tracker_->num_left(), buffers_.plan().num_buckets(), tracker_->missing().size(), params_.size()));
  }
  if (phase_ != Phase::kReduced) {
    raise(Code::kFinalizeRefused,
          "finalize_backward() was called, but no gradient reduction requires finalization. Call "
          "it once after each synchronised backward.");
  }
  phase_ = Phase::kCollecting;  // should this throw, the next forward recovers
  finish();
}

void Reducer::set_live_ranks(std::function<int()> count) {
  const std::lock_guard lock(mutex_);
  live_ranks_ = std::move(count);
}

void Reducer::add_final_wait(std::function<void()> wait) {
  const std::lock_guard lock(mutex_);
  final_waits_.push_back(std::move(wait));
}

void Reducer::leave_gradients_to_hook() {
  const std::lock_guard lock(mutex_);
  publishes_ = false;
}

void Reducer::reset(std::shared_ptr<Communicator> comm) {
  const std::lock_guard lock(mutex_);
  comm_ = std::move(comm);
  forget_transfers();
  recording_.drop_pass();
  weight_.end_pass();
  final_waits_.clear();
  guard_.reset();
  outputs_.clear();
  unusable_.clear();
  forwards_ = 0;
  passes_ = 0;
  compared_pass_ = -1;
  failed_pass_ = -1;
  threw_ = 0;
  usage_.end_step();
  // Memory of our own: collectives of the old group may still write to the other one.
  realign();
  phase_ = Phase::kIdle;
  plan_state_ = PlanState::kProvisional;
}

void Reducer::set_error_observer(std::function<void(const std::string&)> observer) {
  const std::lock_guard lock(mutex_);
  error_observer_ = std::move(observer);
}

void Reducer::set_warning_observer(std::function<void(Code, const std::string&)> observer) {
  const std::lock_guard lock(mutex_);
  warning_observer_ = std::move(observer);
}

void Reducer::set_published_observer(std::function<void(ParamId)> observer) {
  const std::lock_guard lock(mutex_);
  published_observer_ = std::move(observer);
}

/// The plan as it is, laid out anew for this hook and this set of ranks.
void Reducer::realign() {
  choose_in_place(specs_, in_place_bytes());
  adopt_plan(realigned(buffers_.plan(), specs_, hook_->slot_alignment()));
}

void Reducer::on_new_connections() {
  const std::lock_guard lock(mutex_);
  check_between_steps("the communicator cannot be replaced");
  realign();
}

void Reducer::adopt_plan(BucketPlan plan) {
  buffers_.adopt(std::move(plan), wire_type(*hook_, comm_->size()));
  tracker_.emplace(buffers_.plan());
  hook_->on_new_plan();
  describe_plan();
}

bool Reducer::adopt_waiting_plan() {
  if (plan_state_ != PlanState::kOrderKnown) return false;
  // The order of rank 0 counts: ranks may have seen different ones, and the plan must be the same everywhere.
  progress_->enter(Stage::kBufferWait);
  std::vector<int32_t> order;
  for (const ParamId id : last_arrival_) order.push_back(static_cast<int32_t>(index(id)));
  adopt_from_rank_zero(*comm_, order, device());
  std::vector<ParamId> arrival;
  for (const int32_t i : order) arrival.push_back(param_id(static_cast<size_t>(i)));
  std::vector<BucketGroup> groups = with_short_tail(specs_, group_by_arrival(specs_, arrival, options_.limits));
  adopt_plan(BucketPlan(specs_, std::move(groups), hook_->slot_alignment()));
  plan_state_ = PlanState::kFinal;
  return true;
}

void Reducer::learn_from_pass() {
  const bool complete_order = !exchanges_usage();
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

}  // namespace lockstep
