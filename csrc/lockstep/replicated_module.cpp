#include "lockstep/replicated_module.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/monitor.h"
#include "comm/store_prefix.h"
#include "comm/watched_communicator.h"
#include "core/error.h"
#include "lockstep/meeting.h"

namespace lockstep {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBroadcastBytes = 250 * kMiB;  // torch's size of a broadcast at construction

int64_t bytes_of(double megabytes, const char* option) {
  if (!(megabytes > 0) || !std::isfinite(megabytes)) {
    fail(Code::kFrontArgument, "{} is the size of a bucket in MiB and must be positive, but is {}.", option, megabytes);
  }
  return std::max<int64_t>(1, static_cast<int64_t>(megabytes * static_cast<double>(kMiB)));
}

/// By torch's rules, with the sizes for GPUs that the Python package chooses.
void set_limits(ReducerOptions& reducer, const Options& options, int64_t total_bytes, bool on_host) {
  const bool dynamic = options.find_unused_parameters() && !options.static_graph();
  if (!options.bucket_cap_mb_list().empty()) {
    reducer.limits.clear();
    for (const double size : options.bucket_cap_mb_list())
      reducer.limits.push_back(bytes_of(size, "bucket_cap_mb_list"));
    reducer.first_limits = reducer.limits;
  } else if (options.bucket_cap_mb()) {
    reducer.limits = {bytes_of(*options.bucket_cap_mb(), "bucket_cap_mb")};
    if (dynamic) reducer.first_limits = reducer.limits;
  } else {
    if (!on_host) reducer.limits = chosen_limits(total_bytes);
    if (dynamic) reducer.first_limits = reducer.limits;
  }
}

ReducerOptions reducer_options(const Options& options, const ParamList& params) {
  int64_t total = 0;
  for (const at::Tensor& tensor : params.tensors) total += static_cast<int64_t>(tensor.nbytes());
  ReducerOptions reducer;
  if (options.find_unused_parameters() && !options.static_graph()) reducer.graph = GraphKind::kDynamic;
  if (options.gradient_as_bucket_view()) reducer.placement = GradPlacement::kBucketView;
  if (options.lazy_bucket_allocation()) reducer.lifetime = BucketLifetime::kStep;
  reducer.skip_unused_buckets = options.skip_all_reduce_unused_params();
  reducer.strict = options.strict();
  reducer.uneven_forwards = options.uneven_forwards();
  reducer.guards = options.guards();
  set_limits(reducer, options, total, params.tensors.front().device().is_cpu());
  return reducer;
}

void check_numbers(const Options& options) {
  if (options.check_sync_every() < 0 || options.stall_threshold().count() < 0) {
    fail(Code::kFrontArgument,
         "check_sync_every ({}) and stall_threshold ({} ms) must not be negative; 0 turns them off.",
         options.check_sync_every(), options.stall_threshold().count());
  }
}

std::string kind_text(const c10::TensorOptions& kind) {
  return fmt::format("{} on {}", c10::toString(c10::typeMetaToScalarType(kind.dtype())), kind.device().str());
}

}  // namespace

ReplicatedModule::ReplicatedModule(ModuleTensors tensors, ProcessGroup group, Options options)
    : group_(std::move(group)),
      options_(std::move(options)),
      tensors_(std::move(tensors)),
      ignored_(options_.ignored_parameters().begin(), options_.ignored_parameters().end()) {
  ParamList trainable;
  for (size_t i = 0; i < tensors_.parameters.size(); ++i) {
    if (!tensors_.parameters[i].requires_grad() || ignored_.contains(tensors_.parameter_names[i])) continue;
    trainable.tensors.push_back(tensors_.parameters[i]);
    trainable.names.push_back(tensors_.parameter_names[i]);
    trainable.sparse.push_back(tensors_.sparse[i]);
  }
  // One rank's mistake is everybody's error: nobody waits for a rank that has none of it.
  const std::string key = next_store_prefix("wrap", group_.c10d()->getGroupName(), group_.rank());
  together(group_.meeting(key, "wrap its module"), [&] {
    check_numbers(options_);
    if (options_.allow_passthrough() && trainable.tensors.empty()) return;
    auto progress = std::make_shared<Progress>();
    if (!trainable.tensors.empty()) device_ = trainable.tensors.front().device();
    auto comm = make_watched_communicator(
        group_.c10d(), progress, device_,
        {.threshold = options_.stall_threshold(), .kind = options_.communicator(), .nccl = options_.nccl()});
    ReducerOptions reducer = trainable.tensors.empty() ? ReducerOptions{} : reducer_options(options_, trainable);
    replica_ = std::make_unique<Replica>(trainable, std::move(comm), std::move(reducer), std::move(progress));
  });
  if (replica_) start();
}

void ReplicatedModule::start() {
  if (options_.init_sync()) {
    replica_->verify_same_model();
    replica_->isolate();
    std::vector<at::Tensor> state;
    for (size_t i = 0; i < tensors_.parameters.size(); ++i) {
      if (!ignored_.contains(tensors_.parameter_names[i])) state.push_back(tensors_.parameters[i].detach());
    }
    for (size_t i = 0; i < tensors_.buffers.size() && options_.broadcast_buffers(); ++i) {
      if (!ignored_.contains(tensors_.buffer_names[i])) state.push_back(tensors_.buffers[i].detach());
    }
    replica_->copy_from(state, kBroadcastBytes, 0);
  } else if (options_.communicator() == CommunicatorKind::kNccl) {
    replica_->isolate();
  }
  if (options_.static_graph()) reducer().set_static_graph();
  ParamList frozen;
  for (size_t i = 0; i < tensors_.parameters.size(); ++i) {
    const at::Tensor& parameter = tensors_.parameters[i];
    const bool trained = parameter.requires_grad() && !ignored_.contains(tensors_.parameter_names[i]);
    kinds_.push_back(parameter.options());
    shapes_.push_back(parameter.sizes().vec());
    accumulators_.push_back(trained ? torch::autograd::impl::grad_accumulator(parameter) : compat::NodePtr());
    if (parameter.requires_grad() || ignored_.contains(tensors_.parameter_names[i])) continue;
    frozen.tensors.push_back(parameter);
    frozen.names.push_back(tensors_.parameter_names[i]);
  }
  reducer().watch_frozen(frozen);
}

Reducer& ReplicatedModule::reducer() const {
  if (!replica_) {
    fail(
        Code::kFrontArgument,
        "[rank {}] this module has no trainable parameters and was wrapped with allow_passthrough: nothing is reduced.",
        group_.rank());
  }
  return replica_->reducer();
}

void ReplicatedModule::raise(Code code, const std::string& text) {
  const std::string full = coded(code, fmt::format("[rank {}] {}", group_.rank(), text));
  if (replica_) {  // the ranks that will wait for this one learn of it
    replica_->progress()->fail(full);
    if (const auto monitor = replica_->communicator().monitor()) monitor->publish_failure(full);
  }
  throw Error(full);
}

void ReplicatedModule::check_unchanged() {
  for (size_t i = 0; i < kinds_.size(); ++i) {
    const at::Tensor& parameter = tensors_.parameters[i];
    if (parameter.sizes() != shapes_[i]) {
      raise(Code::kModuleChanged,
            fmt::format("parameter '{}' had the shape [{}] when the module was wrapped and has [{}] now. Buckets were "
                        "laid out for the former: wrap the module again, or load a file that was saved from it.",
                        tensors_.parameter_names[i], fmt::join(shapes_[i], ", "), fmt::join(parameter.sizes(), ", ")));
    }
    if (parameter.scalar_type() == kinds_[i].dtype() && parameter.device() == kinds_[i].device()) continue;
    raise(Code::kModuleChanged,
          fmt::format("parameter '{}' was {} when the module was wrapped and is {} now. Buckets were laid out for the "
                      "former, and the optimizer may hold state of it: move or convert the module first, then wrap it.",
                      tensors_.parameter_names[i], kind_text(kinds_[i]), kind_text(parameter.options())));
  }
}

/// torch::load gives parameters their values by `set_`, for which autograd forgets the node that the reducer listens
/// to, and makes another one in the next forward. Nothing else about the parameter has changed, so it gets its own
/// back.
void ReplicatedModule::listen_again() {
  namespace impl = torch::autograd::impl;
  for (size_t i = 0; i < accumulators_.size(); ++i) {
    const at::Tensor& parameter = tensors_.parameters[i];
    if (!accumulators_[i] || !parameter.requires_grad()) continue;
    if (impl::try_get_grad_accumulator(parameter) == accumulators_[i]) continue;
    impl::set_grad_accumulator(parameter, compat::WeakNodePtr(accumulators_[i]));
  }
}

void ReplicatedModule::before_forward(bool training) {
  if (!replica_) return;
  check_unchanged();
  listen_again();
  const bool builds_graph = at::GradMode::is_enabled();
  if (builds_graph && reduces_) {
    if (options_.check_sync_every() > 0 && ++reduced_forwards_ % options_.check_sync_every() == 0) assert_in_sync();
    replica_->count_forward();
  }
  if (builds_graph) reducer().begin_step();
  // Under no_grad in eval mode forward changes no buffer, and one rank may evaluate alone.
  if (buffers_due_ && (builds_graph || training)) sync_buffers();
}

void ReplicatedModule::sync_buffers() {
  if (!options_.broadcast_buffers() || tensors_.buffers.empty() || group_.size() == 1) return;
  // Autograd may have saved the values of the forward before, and what it saved cannot be told from the buffer itself.
  if (reducer().expects_backward()) return;
  std::vector<at::Tensor> shared;
  for (size_t i = 0; i < tensors_.buffers.size(); ++i) {
    if (!ignored_.contains(tensors_.buffer_names[i])) shared.push_back(tensors_.buffers[i].detach());
  }
  replica_->copy_from(shared, kBroadcastBytes, 0);
}

void ReplicatedModule::after_forward(const std::vector<at::Tensor>& outputs) {
  if (!replica_ || !at::GradMode::is_enabled()) return;
  if (reduces_) {
    std::vector<at::Tensor> watched;
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) watched.push_back(output);
    }
    reducer().expect_backward(watched);
  } else {
    reducer().expect_local_backward();
  }
  local_gradients_ = !reduces_;
  buffers_due_ = reduces_;
}

std::string ReplicatedModule::stray_input(const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || inputs[i].device() == device_) continue;
    return fmt::format("input tensor {} of forward is on {}, but the module is on {}", i, inputs[i].device().str(),
                       device_.str());
  }
  return {};
}

void ReplicatedModule::explain_failure(const std::string& stray, const char* text) {
  if (stray.empty()) return;
  raise(Code::kWrongDevice,
        fmt::format("forward failed, and {}. Move the batch to the module's device first. ({})", stray, text));
}

bool ReplicatedModule::set_sync(bool reduces) {
  if (replica_) reducer().note_sync_switch(reduces);
  return std::exchange(reduces_, reduces);
}

void ReplicatedModule::sync_gradients() {
  reducer().sync_gradients();
  local_gradients_ = false;
}

void ReplicatedModule::assert_in_sync() {
  if (!replica_) return;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  const auto add = [&](const std::vector<at::Tensor>& from, const std::vector<std::string>& called) {
    for (size_t i = 0; i < from.size(); ++i) {
      if (ignored_.contains(called[i])) continue;
      tensors.push_back(from[i].detach());
      names.push_back(called[i]);
    }
  };
  add(tensors_.parameters, tensors_.parameter_names);
  add(tensors_.buffers, tensors_.buffer_names);
  replica_->assert_in_sync(tensors, names);
}

void ReplicatedModule::expect_unused(const std::vector<std::string>& names) {
  const std::vector<std::string>& known = reducer().params().names;
  std::vector<ParamId> ids;
  for (const std::string& name : names) {
    const size_t before = ids.size();
    for (size_t i = 0; i < known.size(); ++i) {
      if (known[i] == name || known[i].starts_with(name + ".")) ids.push_back(param_id(i));
    }
    if (ids.size() != before) continue;
    fail(Code::kFrontArgument,
         "[rank {}] expect_unused: the module has no trainable parameter or submodule called '{}'.", group_.rank(),
         name);
  }
  reducer().expect_unused(ids);
}

void ReplicatedModule::set_hook(std::unique_ptr<CommHook> hook) { reducer().set_hook(std::move(hook)); }

double ReplicatedModule::clip_grad_norm(double max_norm, double norm_type) {
  if (!(max_norm > 0) || !(norm_type > 0)) {
    fail(Code::kFrontArgument, "[rank {}] clip_grad_norm takes a positive max_norm and norm_type, but got {} and {}.",
         group_.rank(), max_norm, norm_type);
  }
  if (local_gradients_) {
    fail(Code::kFrontArgument,
         "[rank {}] the last backward ran in no_sync, so gradients differ between ranks and so would what clipping "
         "makes "
         "of them. Clip after the backward that reduces, or call sync_gradients() first.",
         group_.rank());
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < tensors_.parameters.size(); ++i) {
    const at::Tensor& gradient = tensors_.parameters[i].grad();
    if (gradient.defined() && !ignored_.contains(tensors_.parameter_names[i])) gradients.push_back(gradient);
  }
  if (gradients.empty()) return 0;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    norms.push_back(at::linalg_vector_norm(values, norm_type, std::nullopt, false, at::kDouble).to(device_));
  }
  const double total = at::linalg_vector_norm(at::stack(norms), norm_type).item<double>();
  const double scale = max_norm / (total + 1e-6);
  if (scale < 1) {
    for (at::Tensor& gradient : gradients) gradient.mul_(scale);
  }
  return total;
}

}  // namespace lockstep
