// What the reducer answers about itself, for logs and tests.
#include <ATen/ATen.h>

#include "reducer/reducer.h"

namespace lockstep {

bool Reducer::expects_backward() {
  const std::lock_guard lock(mutex_);
  return phase_ != Phase::kIdle;
}

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
  for (size_t b = 0; b < buffers_.plan().num_buckets(); ++b) result.push_back(payload_bytes(bucket_id(b)));
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
  return usage_.map(device());
}

size_t Reducer::num_sent_buckets() {
  const std::lock_guard lock(mutex_);
  return num_sent_;
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

bool Reducer::graph_has_been_static() {
  const std::lock_guard lock(mutex_);
  return options_.graph != GraphKind::kDynamic || usage_.same_in_all_steps();
}

std::optional<bool> Reducer::can_set_static_graph() {
  const std::lock_guard lock(mutex_);
  if (options_.graph != GraphKind::kDynamic || num_reductions_ < 2) return std::nullopt;
  return usage_.same_in_all_steps();
}

StepTimes Reducer::last_step_times() {
  const std::lock_guard lock(mutex_);
  return last_times_;
}

void Reducer::record(RecordLevel level) {
  const std::lock_guard lock(mutex_);
  check_between_steps("recording cannot be switched");
  recording_.set_level(level, device());
}

std::vector<PassTimes> Reducer::take_recorded() {
  const std::lock_guard lock(mutex_);
  return recording_.take();
}

int64_t Reducer::payload_bytes(BucketId id) const {
  const Bucket& bucket = buffers_.plan().bucket(id);
  return bucket.payload_numel * specs_[index(bucket.params.front())].element_size;
}

int64_t Reducer::num_reductions() {
  const std::lock_guard lock(mutex_);
  return num_reductions_;
}

}  // namespace lockstep
