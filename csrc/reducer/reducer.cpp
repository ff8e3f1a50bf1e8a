#include "reducer/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "reducer/late_gradients.h"
#include "reducer/messages.h"

// The path of a gradient through one step. What happens between steps is in between_steps.cpp; a rank that has no
// gradients for a step takes part in it by stand_ins.cpp.

namespace lockstep {
namespace {

constexpr uint32_t kNeverComplete = std::numeric_limits<uint32_t>::max();

}  // namespace

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
  check_announced(id);
  weight_.note_gradient();
  if (!params_.tensors[index(id)].grad().defined()) check_cleared(id);
  if (phase_ == Phase::kArmed || phase_ == Phase::kPartial) open(Opening::kGradient);
  if (phase_ == Phase::kCollecting && arrivals_++ == 0) {
    refuse_distributed_autograd();
    check_create_graph();
    send(unawaited_);
  }
  if (options_.graph != GraphKind::kComplete && params_.tensors[index(id)].grad().defined()) usage_.mark_used(id);
  if (phase_ == Phase::kIdle || phase_ == Phase::kAccumulating) return;
  collect(id);
}

void Reducer::refuse_distributed_autograd() const {
  if (!in_distributed_autograd()) return;
  raise(Code::kDistributedAutograd,
        "DistributedDataParallel of lockstep does not reduce gradients of torch.distributed.autograd, which "
        "keeps them outside of `.grad`. Use torch's own class for models that call backward over RPC.");
}

void Reducer::open(Opening opening) {
  opening_ = opening;
  before_ = std::exchange(phase_, Phase::kCollecting);
  backward_kind_ = opening == Opening::kOutput ? current_backward_kind(hooks_) : BackwardKind::kOther;
  progress_->enter(Stage::kBackward);
  if (before_ != Phase::kPartial) begin_pass();  // else the same pass goes on
  // After that: should these throw, all buckets are owed.
  hook_end_of_backward();
  if (before_ == Phase::kArmed) check_switch();
}

void Reducer::begin_pass() {
  times_.backward_compute_start = steady_ns();
  arrivals_ = 0;
  arrival_.clear();
  forget_transfers();
  num_handled_ = 0;
  if (records_firings()) {
    std::fill(counted_.begin(), counted_.end(), 0);
    std::fill(expected_.begin(), expected_.end(), kNeverComplete);
  } else if (options_.graph == GraphKind::kDynamic && !options_.skip_unused_buckets) {
    usage_.expect(params_, expected_);  // with skipping, a late gradient would have no bucket to be added to
  } else if (options_.graph == GraphKind::kStatic) {
    expected_ = *firings_;
  }
  unawaited_ = tracker_->begin(expected_);
  if (records()) recording_.begin_backward(buffers_.plan());
  divisor_ = live_ranks_ ? live_ranks_() : comm_->size();
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
  if (tracker_->complete(id)) {
    arrival_.push_back(id);
    if (records_buckets()) recording_.arrived(buffers_.plan().slot(id).bucket);
  }
  send(ready);
}

/// A report beyond those announced.
void Reducer::reject(ParamId id) {
  if (specs_[index(id)].numel == 0) return;
  if (options_.graph == GraphKind::kDynamic && expected_[index(id)] == 0) {
    if (tracker_->has_left(id)) usage_.mark_late(id);
    if (usage_.hinted(id)) warn(Code::kBadHint, messages::bad_hint(params_, id));
    return;
  }
  phase_ = Phase::kPartial;
  raise(Code::kReadyTwice, messages::ready_twice(params_, id, options_.graph));
}

/// Runs `step` and adds to its error which bucket of which rank it was about. Other kinds of exception, such as those
/// of hooks written in Python, keep their type and text.
template <typename Step>
auto Reducer::naming(BucketId id, const Step& step) {
  const auto where = [&] { return fmt::format("[rank {}] while reducing {}", comm_->rank(), buffers_.describe(id)); };
  try {
    return step();
  } catch (const PeerError& error) {  // it says which bucket
    give_up(error);
    throw;
  } catch (c10::Error& error) {
    error.add_context(coded(Code::kReductionFailed, where()));
    if (!has_ended(progress_->stage())) progress_->fail(error.what_without_backtrace());
    throw;
  } catch (const std::runtime_error& error) {
    progress_->fail(error.what());
    fail(Code::kReductionFailed, "{}: {}", where(), error.what());
  }
}

void Reducer::send(BucketRange range) {
  for (size_t b = range.first; b < range.last; ++b) {
    send_bucket(bucket_id(b));
    num_handled_ = b + 1;
  }
}

void Reducer::send_bucket(BucketId id) {
  start_guard(false);
  if (is_skipped(id)) return skipped_.push_back(id);
  const bool recorded = records_buckets() && !is_empty(id);
  const NvtxRange range(recorded && !device().is_cpu(), recorded ? "lockstep sends " + buffers_.describe(id) : "");
  Communicator& comm = recorded ? recording_.start(id, payload_bytes(id), comm_) : *comm_;
  if (weight_.used()) {
    for (const ParamId param : buffers_.plan().bucket(id).params) weight_.restore(params_.tensors[index(param)], param);
  }
  buffers_.absorb(
      id, packing_scale(), options_.graph == GraphKind::kComplete ? GradBuffers::PresenceOf() : [this](ParamId param) {
        return presence(param);
      });
  if (is_empty(id)) return;
  if (in_flight_.empty()) times_.communication_start = steady_ns();
  GradBucket bucket = buffers_.lend(id);
  bucket.undivided = reduces_in_place();
  naming(id, [&] { in_flight_.push_back({id, hook_->start(bucket, comm)}); });
  if (recorded) recording_.sent(id);
}

double Reducer::packing_scale() const {
  if (reduces_in_place()) return scale() * comm_->size();  // the rest of the division
  return hook_->input() == CommHook::Input::kSummand ? scale() : weight_.unit();
}

bool Reducer::is_empty(BucketId id) const {
  const Bucket& bucket = buffers_.plan().bucket(id);
  return bucket.payload_numel == 0 && !bucket.sparse;
}

/// Nobody used it, as far as all ranks know alike: in the last step before the exchange, in this one after it.
bool Reducer::is_skipped(BucketId id) const {
  if (!options_.skip_unused_buckets || options_.graph != GraphKind::kDynamic || !usage_.knows_other_ranks())
    return false;
  const std::vector<ParamId>& members = buffers_.plan().bucket(id).params;
  return std::none_of(members.begin(), members.end(), [this](ParamId param) { return usage_.used_anywhere(param); });
}

GradBuffers::Presence Reducer::presence(ParamId id) const {
  if (usage_.used_here(id)) return GradBuffers::Presence::kInside;
  // Another thread may be writing this gradient right now: it counts when it is reported, as a late one.
  const bool presumed_unused = options_.graph == GraphKind::kDynamic && expected_[index(id)] == 0;
  if (presumed_unused && specs_[index(id)].numel != 0) return GradBuffers::Presence::kAbsent;
  // It may turn out to be used nowhere, and must then be what it was.
  return GradBuffers::Presence::kOutside;
}

// ---- at the end of backward ----

void Reducer::on_backward_ended(int backward) {
  if (phase_ != Phase::kCollecting || backward != closing_backward_) return;
  times_.backward_compute_end = steady_ns();
  if (records()) recording_.end_backward();
  if (arrivals_ == 0) {  // somebody asked for the gradient of an input, say
    phase_ = before_;
    progress_->enter(Stage::kBeforeBackward);
    return check_silent_backward();
  }
  const bool may_stop_waiting =
      opening_ == Opening::kOutput && (records_firings() || options_.graph == GraphKind::kDynamic);
  if (!tracker_->all_left() && !may_stop_waiting) {
    phase_ = Phase::kPartial;
    progress_->enter(Stage::kBeforeBackward);
    return report_local_gradients();
  }
  start_guard(false);
  send(tracker_->finish());
  num_sent_ = in_flight_.size();
  if (finalization_ == Finalization::kManual) {
    phase_ = Phase::kReduced;
    return;
  }
  finish();
}

void Reducer::finish() {
  progress_->enter(Stage::kBucketWait);
  // What the ranks agreed on in the step before a CUDA graph is captured holds for its replays.
  const bool exchanges = exchanges_usage() && !buffers_.are_captured();
  // A hook that goes on communicating in callbacks would race with an exchange of ours: it must be done first.
  const bool hook_first = exchanges && hook_->communicates_later();
  if (exchanges && !hook_first) usage_.start_exchange(*comm_, device());
  check_guard(reading());
  if (hook_first) {
    while (!in_flight_.empty()) take_mean();
    usage_.start_exchange(*comm_, device());
  }
  if (exchanges) usage_.finish_exchange(*comm_, usage_reading());
  while (!means_.empty()) publish_first();
  send_used_after_all();
  while (!in_flight_.empty()) {
    take_mean();
    publish_first();
  }
  times_.communication_end = steady_ns();
  for (const auto& wait : std::exchange(final_waits_, {})) wait();
  check_unused_option();
  if (options_.graph == GraphKind::kDynamic) usage_.note_reduced();
  learn_from_pass();
  if (records()) recording_.end_pass(num_reductions_);
  ++num_reductions_;
  end_pass();
  last_times_ = times_;
  if (const auto monitor = comm_->monitor(); monitor && !device().is_cpu() && !buffers_.are_captured()) {
    monitor->mark(device());
  }
  phase_ = Phase::kIdle;
  progress_->enter(Stage::kBetweenSteps);
}

/// Waits for the first bucket on its way. What throws here and below leaves what is still to be done to `recover`.
void Reducer::take_mean() {
  const BucketId id = in_flight_.front().bucket;
  const auto pending = std::move(in_flight_.front().mean);
  progress_->enter(Stage::kBucketWait, index(id));
  const bool recorded = records_buckets();
  if (recorded) recording_.begin_wait(id);
  const NvtxRange range(recorded && !device().is_cpu(), recorded ? "lockstep awaits " + buffers_.describe(id) : "");
  at::Tensor mean = naming(id, [&] { return pending->wait(); });
  if (recorded) recording_.end_wait(id);
  in_flight_.pop_front();
  means_.push_back({id, std::move(mean)});
}

void Reducer::publish_first() {
  const Mean next = std::move(means_.front());
  means_.pop_front();
  publish(next.bucket, next.mean);
}

/// Buckets that were held back because nobody used them in the last step, and that somebody has used in this one.
void Reducer::send_used_after_all() {
  for (; !skipped_.empty(); skipped_.pop_front()) {
    if (is_skipped(skipped_.front())) continue;
    send_bucket(skipped_.front());
    ++num_sent_;
  }
}

void Reducer::forget_transfers() {
  in_flight_.clear();
  means_.clear();
  skipped_.clear();
}

void Reducer::publish(BucketId id, const at::Tensor& mean) {
  if (!publishes_) return;
  GradBuffers::Predicate keep;
  if (options_.graph != GraphKind::kComplete) keep = [this](ParamId param) { return !usage_.used_anywhere(param); };
  if (options_.graph == GraphKind::kDynamic && usage_.anyone_late()) {
    add_late_gradients(buffers_, id, params_, usage_, scale(), *comm_, mean);
  }
  buffers_.publish(id, mean, keep);
  if (weight_.used()) weigh(id, keep);
  if (!published_observer_) return;
  for (const ParamId param : buffers_.plan().bucket(id).params) {
    if (!(keep && keep(param))) published_observer_(param);
  }
}

/// The mean over ranks of weighted gradients becomes their weighted mean.
void Reducer::weigh(BucketId id, const GradBuffers::Predicate& keep) {
  std::vector<ParamId> ids;
  for (const ParamId param : buffers_.plan().bucket(id).params) {
    if (!(keep && keep(param))) ids.push_back(param);
  }
  const at::Tensor own = at::full({1}, weight_.total(), at::kDouble);
  const at::Tensor& weights = comm_->size() == 1 ? own : guard_.weights();
  divide_by_weights(params_, ids, weights, divides_by_live_ranks() ? divisor_ : comm_->size());
}

/// All ranks have taken part in one more pass, whatever came of it.
void Reducer::end_pass() {
  ++passes_;
  hook_->on_pass_ended();
  weight_.end_pass();
  threw_ = 0;
  forwards_ = 0;
  outputs_.clear();
}

}  // namespace lockstep
