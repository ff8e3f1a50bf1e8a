// What the reducer tells its user: errors, warnings, and the checks that lead to them.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "core/fingerprint.h"
#include "reducer/messages.h"
#include "reducer/reducer.h"

namespace lockstep {
namespace {

/// What decides the sizes of the buckets that will follow.
std::array<uint64_t, 3> sizes_of(const PassWord& word) {
  return {static_cast<uint64_t>(word.mode), word.plan, word.hook};
}

}  // namespace

void Reducer::raise(Code code, const std::string& text) const {
  const std::string full = coded(code, fmt::format("[rank {}] {}", comm_->rank(), text));
  progress_->fail(full);
  if (const auto monitor = comm_->monitor()) monitor->publish_failure(full);
  if (error_observer_) error_observer_(full);
  throw Error(full);
}

void Reducer::warn(Code code, const std::string& text) const {
  if (options_.strict) raise(code, text);
  const std::string full = coded(code, fmt::format("[rank {}] {}", comm_->rank(), text));
  if (warning_observer_) return warning_observer_(code, full);
  TORCH_WARN(full);
}

void Reducer::warn_once(Code code, const std::string& text) {
  if (warned_.insert(code).second) warn(code, text);
}

// ---- gradients that nobody expects, or that are gone ----

/// A gradient has arrived. Did a forward say what is to become of it, and does the user's switch still say the same?
void Reducer::check_announced(ParamId id) {
  if (phase_ == Phase::kIdle) {
    return warn_once(
        Code::kUnannounced,
        fmt::format(
            "parameter {} got a gradient in a backward that no forward of the wrapper has announced: forward was "
            "not run through the wrapper (`model.module(...)`, or a method other than forward), or its gradients "
            "had been reduced before. These gradients stay on this rank. Call the wrapper itself, or use "
            "`model.call(\"method\", ...)`; `model.no_sync()` says that this is meant.",
            params_.label(id)));
  }
  if (phase_ == Phase::kAccumulating && switch_reduces_) {
    warn_once(
        Code::kModeFlipped,
        "forward ran under no_sync() (require_backward_grad_sync=False), but backward runs outside of it: forward "
        "decides, so these gradients stay on this rank. Put forward and backward under the same setting.");
  }
}

/// The first gradient of a pass has arrived, while autograd records what it does if `create_graph` was given.
void Reducer::check_create_graph() {
  if (!at::GradMode::is_enabled()) return;
  warn_once(Code::kHigherOrder,
            "backward(create_graph=True): the gradients are means over ranks, but their graph is that of this rank "
            "alone, without the reduction: what a second backward through them computes is local and is not reduced. "
            "For a gradient penalty on inputs, take torch.autograd.grad(outputs, inputs, create_graph=True), add it "
            "to the loss, and call backward once.");
}

/// A backward that forward has announced as one to be reduced begins.
void Reducer::check_switch() {
  if (!switch_reduces_) {
    warn_once(Code::kModeFlipped,
              "no_sync() was entered after forward (require_backward_grad_sync=False now, True at forward): forward "
              "decides, so this backward still synchronises. Put forward and backward under the same setting.");
  }
}

/// The gradient is said to be there, but is not.
void Reducer::check_cleared(ParamId id) {
  if (specs_[index(id)].numel == 0 || !has_user_hook(params_.tensors[index(id)])) return;
  warn_once(
      Code::kClearedByHook,
      fmt::format("the gradient of parameter {} was cleared by a hook before it could be reduced; zeros are sent for "
                  "it. An optimizer step in a post-accumulate hook uses the gradients of this rank alone: use "
                  "`model.register_reduced_hook(...)`, which runs after the reduction.",
                  params_.label(id)));
}

/// A backward reached an output of forward and not one of our parameters.
void Reducer::check_silent_backward() {
  if (backward_kind_ == BackwardKind::kGradOfParameters) {
    return warn_once(
        Code::kGradOfParameters,
        "torch.autograd.grad(...) with respect to parameters returns the gradients of this rank alone; only "
        "backward() reduces them over ranks. The next backward works as usual.");
  }
  if (backward_kind_ != BackwardKind::kAccumulate || hooks_.nodes().empty()) return;
  const bool all_as_wrapped = std::equal(params_.tensors.begin(), params_.tensors.end(), hooks_.nodes().begin(),
                                         hooks_.nodes().end(), accumulates_through);
  if (all_as_wrapped) return;
  phase_ = Phase::kPartial;
  report_local_gradients();
}

/// A backward has ended with gradients missing. Another one may bring those that an output of forward still leads to:
/// two losses, say. Anything else is reported at once.
void Reducer::report_local_gradients() {
  const std::vector<ParamId> missing = tracker_->missing();
  if (missing.empty()) return;
  // Now, while the outputs are still there; the error of the next forward says the same.
  const std::vector<bool> may_come = outputs_.reach(missing, hooks_);
  missing_because_ = reasons_for(missing, may_come, params_, hooks_);
  if (outputs_.empty())
    missing_because_ = "forward returned no tensor that the wrapper could find; " + missing_because_;
  if (reported_.contains(missing)) return;
  if (std::all_of(may_come.begin(), may_come.end(), [](bool yes) { return yes; })) return;
  reported_.insert(missing);
  std::vector<ParamId> local;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (tracker_->complete(param_id(i)) && !tracker_->has_left(param_id(i))) local.push_back(param_id(i));
  }
  warn(Code::kLocalGradients, messages::local_gradients(params_, missing, local, missing_because_));
}

/// Looking for unused parameters is not free; says so once when it never finds any.
void Reducer::check_unused_option() {
  constexpr int64_t kSteps = 100;
  if (options_.graph != GraphKind::kDynamic) return;
  if (usage_.any_unused()) {
    warned_.insert(Code::kNothingUnused);
  } else if (++steps_without_unused_ == kSteps && comm_->rank() == 0) {
    warn_once(
        Code::kNothingUnused,
        fmt::format("find_unused_parameters=True, but every parameter was used in each of the first {} steps. The "
                    "option costs a small exchange per step; leave it out unless the model's control flow needs it.",
                    kSteps));
  }
}

void Reducer::mute(Code code) {
  const std::lock_guard lock(mutex_);
  warned_.insert(code);
}

void Reducer::check_frozen() {
  for (size_t i = 0; i < frozen_.size(); ++i) {
    const auto param = frozen_[i].lock();
    if (!param || !param->requires_grad()) continue;
    raise(Code::kUnfrozen,
          fmt::format(
              "parameter '{}' requires a gradient now, but was frozen when the module was wrapped: it would not be "
              "reduced, and ranks would drift apart. wrap the module again after changing requires_grad.",
              frozen_names_[i]));
  }
}

// ---- agreement with the other ranks ----

PassWord Reducer::pass_word(bool joined) const {
  return {.forwards = joined || options_.uneven_forwards ? PassWord::kAny : forwards_,
          .pass = joined || live_ranks_ ? PassWord::kAny : passes_,
          .mode = static_cast<int64_t>(options_.graph) + 10 * static_cast<int64_t>(finalization_) +
                  100 * static_cast<int64_t>(options_.skip_unused_buckets) +
                  1000 * static_cast<int64_t>(records_firings()) + 10000 * static_cast<int64_t>(weight_.used()),
          .plan = plan_fingerprint_,
          .hook = fingerprint(hook_->signature()),
          .threw = threw_,
          .weight = joined ? 0.0 : weight_.total()};
}

/// Tells the other ranks, once in a pass. Returns true when they must be heard before any bucket leaves: some groups
/// abort the process over buckets of another size than theirs.
bool Reducer::send_word(bool joined) {
  if (weight_.used() && buffers_.are_captured()) {
    raise(Code::kReductionFailed,
          "a step with set_step_weight() cannot be captured into a CUDA graph: the weights of all ranks travel by the "
          "guards, which replays leave out. Call set_step_weight(None), or do not capture.");
  }
  // Buckets that leave after all find that it was compared.
  if (!options_.guards || compared_pass_ == passes_ || guard_.started() || buffers_.are_captured()) return false;
  const PassWord word = pass_word(joined);
  guard_.start(*comm_, word, device());
  return sizes_of(word) != agreed_sizes_;
}

void Reducer::start_guard(bool joined) {
  if (!send_word(joined)) return;
  const Stage stage = progress_->stage();
  progress_->enter(Stage::kBucketWait);
  check_guard(Reading::kNow);
  progress_->enter(stage);
  agreed_sizes_ = sizes_of(pass_word(joined));
}

/// Another rank will not come any more: nothing may be reduced from now on.
void Reducer::give_up(const PeerError& error) {
  unusable_ = error.what();
  progress_->give_up(unusable_);
}

/// Runs `call`, which may find that another rank is gone.
template <typename Call>
auto Reducer::giving_up_if_lost(const Call& call) {
  try {
    return call();
  } catch (const PeerError& error) {
    give_up(error);
    throw;
  }
}

/// The device may have waited for another rank that is gone, while the host did not.
void Reducer::raise_if_lost() {
  const auto monitor = comm_->monitor();
  if (monitor && unusable_.empty()) giving_up_if_lost([&] { monitor->raise_if_lost(); });
}

void Reducer::check_guard(Reading reading) {
  if (compared_pass_ == passes_) return;
  const Guard::Finding finding = giving_up_if_lost([&] { return guard_.finish(*comm_, reading); });
  compared_pass_ = passes_;
  if (!finding.text.empty()) failed_pass_ = passes_;
  raise_disagreement(finding);
}

void Reducer::raise_disagreement(const Guard::Finding& finding) {
  if (finding.text.empty()) return;
  const std::string text =
      finding.is_late
          ? fmt::format(
                "the ranks did not agree on what to reduce in the backward before this one: {}. The gradients "
                "of that step were wrong: go back to a checkpoint from before it.",
                finding.text)
          : fmt::format(
                "the ranks do not agree on what to reduce in this backward: {}. Nothing was published; "
                "gradients of this step are those of each rank alone.",
                finding.text);
  if (finding.sizes_may_differ) {
    unusable_ = text;
    forget_transfers();  // they may never end
    phase_ = Phase::kIdle;
  }
  raise(Code::kRanksDisagree, text);
}

void Reducer::describe_plan() {
  std::string layout;
  auto labels = std::make_shared<std::vector<std::string>>();
  for (size_t b = 0; b < buffers_.plan().num_buckets(); ++b) {
    const Bucket& bucket = buffers_.plan().bucket(bucket_id(b));
    labels->push_back(buffers_.describe(bucket_id(b)));
    layout += fmt::format("{};", bucket.numel);
    for (const ParamId id : bucket.params) (layout += params_.names[index(id)]) += ',';
  }
  plan_fingerprint_ = fingerprint(layout);
  progress_->set_labels(std::move(labels));
}

}  // namespace lockstep
