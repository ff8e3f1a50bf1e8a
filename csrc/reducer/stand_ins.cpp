// How a rank takes part in a pass, or in the rest of one, for which it has no gradients: with a value in their place.
// What it issues must follow the order of `send` and `finish`, by which the other ranks reduce the same pass.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"
#include "reducer/late_gradients.h"
#include "reducer/reducer.h"

namespace lockstep {

/// Runs `call`. After a failure its exceptions are dropped: the cause, which has been reported, may strike again, and
/// the other ranks still wait for the rest.
template <typename Call>
void Reducer::attempt(Absence why, const Call& call) {
  try {
    call();
  } catch (const std::exception&) {
    if (why != Absence::kFailure) throw;
  }
}

/// Takes part in the reduction of a bucket without touching its memory, which may hold gradients of ours.
void Reducer::send_stand_in(BucketId id, Absence why) {
  const double value = why == Absence::kFailure ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  GradBucket bucket = buffers_.lend(id);
  bucket.memory = buffers_.stand_in(id, value);
  bucket.in_place = buffers_.in_place_stand_ins(id, value);
  bucket.undivided = reduces_in_place();
  in_flight_.push_back({id, hook_->start(bucket, *comm_)});
}

/// For all buckets from `first` on.
void Reducer::send_stand_ins(size_t first, Absence why) {
  for (size_t b = first; b < buffers_.plan().num_buckets(); ++b) {
    const BucketId id = bucket_id(b);
    if (is_skipped(id)) {
      skipped_.push_back(id);
    } else if (!is_empty(id)) {
      attempt(why, [&] { send_stand_in(id, why); });
    }
  }
  num_handled_ = buffers_.plan().num_buckets();
  if (exchanges_usage() && !hook_->communicates_later()) attempt(why, [this] { start_usage_exchange(); });
}

void Reducer::start_usage_exchange() {
  if (!usage_.exchange_started()) usage_.start_exchange(*comm_, device());
}

/// Waits for what is on its way and drops it; takes part in what the other ranks find out that they still have to send.
void Reducer::await_stand_ins(Absence why) {
  const auto take_first = [&] {
    InFlight next = std::move(in_flight_.front());
    in_flight_.pop_front();
    Mean taken{next.bucket, {}};
    if (next.mean) attempt(why, [&] { taken.mean = next.mean->wait(); });
    means_.push_back(std::move(taken));
  };
  const auto mend_first = [&] {
    Mean next = std::move(means_.front());
    means_.pop_front();
    if (options_.graph != GraphKind::kDynamic || !usage_.anyone_late()) return;
    attempt(why, [&] {
      if (!next.mean.defined()) next.mean = buffers_.stand_in(next.bucket, 0.0);
      add_late_gradients(buffers_, next.bucket, params_, usage_, scale(), *comm_, next.mean);
    });
  };
  if (exchanges_usage()) {
    if (hook_->communicates_later() && !usage_.exchange_started()) {
      while (!in_flight_.empty()) take_first();
    }
    attempt(why, [this] { start_usage_exchange(); });
    if (usage_.exchange_pending()) attempt(why, [this] { usage_.finish_exchange(*comm_, usage_reading()); });
  }
  while (!means_.empty()) mend_first();
  for (; !skipped_.empty(); skipped_.pop_front()) {
    if (!is_skipped(skipped_.front())) attempt(why, [&] { send_stand_in(skipped_.front(), why); });
  }
  while (!in_flight_.empty()) {
    take_first();
    mend_first();
  }
}

void Reducer::shadow_step() {
  const std::lock_guard lock(mutex_);
  progress_->enter(Stage::kBucketWait);
  start_guard(true);
  forget_transfers();
  std::fill(counted_.begin(), counted_.end(), 0);
  arrival_.clear();
  send_stand_ins(0, Absence::kJoined);
  check_guard(reading());
  await_stand_ins(Absence::kJoined);
  learn_from_absence();
  end_pass();
  progress_->enter(Stage::kBetweenSteps);
}

/// The other ranks have seen a whole backward, and will make a plan and a record of it: so must we.
void Reducer::learn_from_absence() {
  for (size_t i = 0; i < counted_.size(); ++i) {
    if (counted_[i] == 0 && usage_.used_anywhere(param_id(i))) counted_[i] = 1;
  }
  learn_from_pass();
}

/// A backward threw before its end. The other ranks may be waiting for every bucket of this step, so those that have
/// not left go out now, filled with NaN: the ranks stay in step, and none can take a mean without us for the truth.
void Reducer::recover() {
  progress_->enter(Stage::kBucketWait);
  const bool word_has_left = guard_.started() || compared_pass_ == passes_;
  const bool all_know = failed_pass_ == passes_;
  Guard::Finding finding;
  attempt(Absence::kFailure, [&] {
    threw_ = 1;
    if (compared_pass_ == passes_) return;
    const bool new_sizes = send_word(false);
    finding = guard_.finish(*comm_, new_sizes ? Reading::kNow : reading());
    if (!finding.text.empty()) failed_pass_ = passes_;
  });
  if (finding.sizes_may_differ) raise_disagreement(finding);
  send_stand_ins(num_handled_, Absence::kFailure);
  await_stand_ins(Absence::kFailure);
  recording_.drop_pass();
  if (failed_pass_ == passes_) {
    usage_.end_step();
  } else {
    learn_from_absence();
  }
  end_pass();
  phase_ = Phase::kIdle;
  if (word_has_left && !all_know) threw_ = 1;  // the next word says it
  raise_disagreement(finding);
}

}  // namespace lockstep
