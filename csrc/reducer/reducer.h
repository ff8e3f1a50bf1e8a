// The path of a gradient through one step: counts arrivals, sends buckets while backward runs, publishes the means.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "buckets/grad_buffers.h"
#include "comm/communicator.h"
#include "comm/monitor.h"
#include "core/backward_tracker.h"
#include "core/error.h"
#include "core/progress.h"
#include "hooks/comm_hook.h"
#include "reducer/autograd_hooks.h"
#include "reducer/guard.h"
#include "reducer/local_gradients.h"
#include "reducer/options.h"
#include "reducer/recording.h"
#include "reducer/step_times.h"
#include "reducer/step_weight.h"
#include "reducer/usage.h"

namespace lockstep {

/// Keeps the gradients of one replica equal to the mean over ranks.
///
/// Thread-safe behind one mutex. Callers must not hold the GIL: a hook written in Python takes it while the mutex is
/// held. A step is `begin_step`, forward, `expect_backward`, backward; leaving out `expect_backward` accumulates
/// gradients on this rank only (`no_sync`). The end of backward waits for the reductions.
class Reducer final : public GradListener, public std::enable_shared_from_this<Reducer> {
 public:
  /// Not collective. The parameters' hooks are installed here and removed on destruction.
  /// @param progress  where this replica writes what it is doing.
  /// @throws lockstep::Error or std::invalid_argument  no parameters, or options that make no sense.
  static std::shared_ptr<Reducer> create(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                                         std::unique_ptr<CommHook> hook,
                                         std::shared_ptr<Progress> progress = std::make_shared<Progress>());
  ~Reducer() override;

  /// Called before every forward that builds a graph. Adopts a plan made from the order of the last backward (once;
  /// collective then), and clears what a backward that threw has left behind. Returns true when a plan was adopted.
  /// @throws lockstep::Error  the last backward ended with gradients missing, or the ranks have lost step; says how.
  bool begin_step();

  /// Announces a backward that is to be reduced. `outputs` are the tensors that forward returned: the pass opens when
  /// backward reaches one of them, or else at the first gradient.
  void expect_backward(std::span<const at::Tensor> outputs);

  /// Announces a backward whose gradients stay on this rank (`no_sync`).
  void expect_local_backward();

  /// The user's switch for reducing has been set. Forward decides; one that is changed before backward is reported.
  void note_sync_switch(bool reduces);

  /// Reduces what has been accumulated so far, without a forward. Collective, between steps. Parameters without a
  /// gradient on any rank keep none; one that has a gradient on some ranks gets the mean with zeros for the others.
  /// @throws lockstep::Error  a backward is expected or running.
  void sync_gradients();

  /// These parameters will probably not be used in the next backward (kDynamic only): their buckets need not wait. A
  /// hint that turns out wrong costs a small reduction more and is reported. On the host only: on a device the other
  /// ranks would have to wait in each step to learn whether a hint was wrong, and hints are ignored.
  void expect_unused(std::span<const ParamId> ids);

  /// Parameters that do not require a gradient now; one that does later is an error at the next forward.
  void watch_frozen(const ParamList& frozen);

  /// Replaces the comm hook. Every rank must do the same. Gradients accumulated so far are kept.
  /// @throws lockstep::Error  a backward is running.
  void set_hook(std::unique_ptr<CommHook> hook);

  /// The gradients of micro-batches from the next forward on count this much: every mean is sum(w g) / sum(w) over
  /// ranks and micro-batches. Holds until it is set again; empty: plain means. All ranks must do so, or none.
  /// @param weight  not negative. Where all are 0, the mean is 0.
  /// @throws lockstep::Error  a backward is running, or the guards are off, by which weights travel.
  void set_step_weight(std::optional<double> weight);

  /// From now on keeps the times of each pass, for `take_recorded`. Costs one wait for a device.
  /// @throws lockstep::Error  a backward is running.
  void record(RecordLevel level);
  /// Passes recorded since the last call, at most `Recording::kKept`, that have ended on the device too.
  [[nodiscard]] std::vector<PassTimes> take_recorded();

  /// What the comm hook keeps between steps.
  /// @throws lockstep::Error  a backward is running; nothing has changed.
  [[nodiscard]] HookState hook_state();
  /// Gives the hook a state saved earlier. Warns of what does not fit.
  /// @throws lockstep::Error  a backward is running, or the state is of another hook or model; nothing has changed.
  void load_hook_state(const HookState& state);
  [[nodiscard]] HookStats hook_stats();
  [[nodiscard]] std::string hook_signature();

  /// From now on the graph is the same in every step. Before the first synchronised backward only.
  /// @throws lockstep::Error  a synchronised backward has taken place.
  void set_static_graph();

  /// @throws lockstep::Error  as `begin_step`.
  void check_finished();

  /// Ends a pass that failed on this rank, as the next forward would. To be called where none may follow.
  /// @throws lockstep::Error  as `begin_step`.
  void finish_failed_pass();

  /// Takes part in every reduction of one step with zeros, for a rank that has run out of data. Collective.
  void shadow_step();

  /// Asks `count` how many ranks to divide by, at the start of each pass; an empty function: all of them.
  void set_live_ranks(std::function<int()> count);

  /// Runs `wait` at the end of the backward that is reduced next, after its gradients were published.
  void add_final_wait(std::function<void()> wait);

  /// From now on the hook consumes the means (its optimizer has applied them): nothing is written to the gradients.
  void leave_gradients_to_hook();

  /// The communicator has moved to other connections of the same ranks: lays the buckets out for what it can do.
  /// @throws lockstep::Error  a backward is running.
  void on_new_connections();

  /// Moves to another set of ranks: forgets whatever was under way, and makes a new plan after the next backward.
  void reset(std::shared_ptr<Communicator> comm);

  /// With `required`, the end of backward publishes nothing: the user does, by `finalize_by_hand`, on the stream and
  /// thread of his choice.
  /// @throws lockstep::Error  a backward is expected or running.
  void set_manual_finalization(bool required);
  /// The bucket plan is still to be made from this backward, so that finalizing late costs overlap in later steps.
  [[nodiscard]] bool should_finalize_after_backward();
  /// @throws lockstep::Error  finalization is automatic, or nothing is there to be finalized, or not yet.
  void finalize_by_hand();

  /// Hears the text of every error that the reducer raises, before it is thrown.
  void set_error_observer(std::function<void(const std::string&)> observer);
  /// Hears every warning; without one they go to torch's log. With `options.strict` warnings are errors instead.
  void set_warning_observer(std::function<void(Code, const std::string&)> observer);
  /// Hears of every parameter whose mean gradient was published, on the thread that ends the backward.
  void set_published_observer(std::function<void(ParamId)> observer);

  /// Removes the hooks from the parameters: gradients stay local from now on. Safe to call twice.
  void detach();

  /// Forward has run, and what autograd saved of it may still be needed.
  [[nodiscard]] bool expects_backward();
  /// Never gives this warning again.
  void mute(Code code);

  // What is going on, for logs and tests.
  [[nodiscard]] std::vector<std::vector<size_t>> bucket_params();
  [[nodiscard]] std::vector<int64_t> bucket_payload_bytes();
  [[nodiscard]] std::vector<size_t> arrival_order();
  [[nodiscard]] bool has_final_plan();
  [[nodiscard]] at::Tensor used_map();
  [[nodiscard]] int64_t num_reductions();
  [[nodiscard]] size_t num_sent_buckets();
  /// Bytes of parameters that no rank used in the last pass, as far as the kind of graph lets us know.
  [[nodiscard]] int64_t unused_bytes();
  /// False once the set of parameters that this rank uses has changed between two reduced steps, which only kDynamic
  /// allows: static_graph=True would not do for this model.
  [[nodiscard]] bool graph_has_been_static();
  /// The same, once there is evidence: nothing for other kinds of graph, or before two steps have been reduced.
  [[nodiscard]] std::optional<bool> can_set_static_graph();
  [[nodiscard]] StepTimes last_step_times();
  [[nodiscard]] const ParamList& params() const { return params_; }
  [[nodiscard]] Communicator& communicator() const { return *comm_; }

  void on_grad_ready(ParamId id) override;
  void on_output_reached() override;

 private:
  /// Where the step is. One at a time.
  enum class Phase {
    kIdle,          ///< No forward has announced anything.
    kAccumulating,  ///< Forward announced gradients that stay on this rank.
    kArmed,         ///< Forward announced a backward; none has reached us.
    kCollecting,    ///< A backward is running and its end has been hooked.
    kPartial,       ///< A backward has ended with gradients missing; another one may bring them.
    kReduced,       ///< All buckets have left; the user is to publish their means.
  };
  /// Who publishes the means.
  enum class Finalization { kAutomatic, kManual };
  /// What opened the pass. Only an output of forward proves that the end of this backward is the end of the pass: the
  /// first gradient may belong to an inner pass of reentrant checkpointing.
  enum class Opening { kOutput, kGradient };
  /// How final the plan is.
  enum class PlanState { kProvisional, kOrderKnown, kFinal };

  /// Why a rank has no gradients for a pass that the other ranks reduce.
  enum class Absence {
    kJoined,   ///< It has run out of data: zeros stand in for them.
    kFailure,  ///< Its backward threw: NaN does, so that no mean looks like one.
  };

  struct InFlight {
    BucketId bucket;
    std::unique_ptr<PendingMean> mean;  // null: waiting for it has failed
  };
  struct Mean {
    BucketId bucket;
    at::Tensor mean;
  };

  Reducer(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options, std::unique_ptr<CommHook> hook,
          std::shared_ptr<Progress> progress);

  // All of these expect the mutex to be held.
  void open(Opening opening);
  void begin_pass();
  void refuse_distributed_autograd() const;
  void hook_end_of_backward();
  void collect(ParamId id);
  void reject(ParamId id);
  void send(BucketRange range);
  void send_bucket(BucketId id);
  void weigh(BucketId id, const GradBuffers::Predicate& keep);
  void send_stand_in(BucketId id, Absence why);
  void send_stand_ins(size_t first, Absence why);
  void await_stand_ins(Absence why);
  void learn_from_absence();
  void start_usage_exchange();
  template <typename Call>
  void attempt(Absence why, const Call& call);
  template <typename Step>
  auto naming(BucketId id, const Step& step);
  void on_backward_ended(int backward);
  void finish();
  void take_mean();
  void publish_first();
  void send_used_after_all();
  void forget_transfers();
  /// From the first sign of a backward until its means are published.
  [[nodiscard]] bool in_pass() const { return phase_ > Phase::kArmed; }
  [[nodiscard]] bool is_empty(BucketId id) const;
  [[nodiscard]] bool is_skipped(BucketId id) const;
  void publish(BucketId id, const at::Tensor& mean);
  void learn_from_pass();
  void recover();
  void recover_under_these_options();
  void raise_if_unfinished();
  [[noreturn]] void raise(Code code, const std::string& text) const;  // puts the rank in front
  void warn(Code code, const std::string& text) const;                // the same
  void warn_once(Code code, const std::string& text);
  void check_frozen();
  void check_announced(ParamId id);
  void check_switch();
  void check_create_graph();
  void check_cleared(ParamId id);
  void check_silent_backward();
  void report_local_gradients();
  void check_unused_option();
  bool send_word(bool joined);
  void start_guard(bool joined);
  void check_guard(Reading reading);
  void raise_disagreement(const Guard::Finding& finding);
  void adopt_plan(BucketPlan plan);
  void realign();
  void check_between_steps(const char* what) const;
  void describe_plan();
  bool adopt_waiting_plan();
  void end_pass();
  void give_up(const PeerError& error);
  template <typename Call>
  auto giving_up_if_lost(const Call& call);
  void raise_if_lost();
  /// Where small exchanges happen: that of the first parameter.
  [[nodiscard]] at::Device device() const { return params_.tensors.front().device(); }
  /// On a device the host must not wait for what the ranks say about each other.
  [[nodiscard]] Reading reading() const { return device().is_cpu() ? Reading::kNow : Reading::kLater; }
  /// Buckets to be left out are chosen before the next exchange; a static graph is recorded once.
  [[nodiscard]] Reading usage_reading() const {
    return options_.skip_unused_buckets || records_firings() ? Reading::kNow : reading();
  }
  [[nodiscard]] PassWord pass_word(bool joined) const;
  [[nodiscard]] bool exchanges_usage() const { return records_firings() || options_.graph == GraphKind::kDynamic; }
  [[nodiscard]] bool records_firings() const { return options_.graph == GraphKind::kStatic && !firings_; }
  [[nodiscard]] GradBuffers::Presence presence(ParamId id) const;
  [[nodiscard]] double scale() const { return weight_.unit() / divisor_; }
  /// The sum over ranks comes divided by the ranks that contribute; else by all of them.
  [[nodiscard]] bool divides_by_live_ranks() const {
    return reduces_in_place() || hook_->input() == CommHook::Input::kSummand;
  }
  /// Gradients of so many bytes are reduced where they lie, and the communicator divides by the number of ranks.
  [[nodiscard]] std::optional<int64_t> in_place_bytes() const {
    if (options_.placement != GradPlacement::kOwnMemory || !hook_->averages_in_place()) return std::nullopt;
    return comm_->worth_averaging_alone();
  }
  [[nodiscard]] bool reduces_in_place() const { return in_place_bytes().has_value(); }
  [[nodiscard]] double packing_scale() const;
  /// What is captured into a CUDA graph has no moments of its own.
  [[nodiscard]] bool records() const { return recording_.records_steps() && !buffers_.are_captured(); }
  [[nodiscard]] bool records_buckets() const { return recording_.records_buckets() && !buffers_.are_captured(); }
  [[nodiscard]] int64_t payload_bytes(BucketId id) const;

  std::mutex mutex_;
  const ParamList params_;
  std::vector<ParamSpec> specs_;
  std::shared_ptr<Communicator> comm_;
  ReducerOptions options_;
  std::unique_ptr<CommHook> hook_;
  GradBuffers buffers_;
  std::optional<BackwardTracker> tracker_;  // of buffers_' plan
  UsageTracker usage_;
  StepWeight weight_;
  Recording recording_;
  const std::shared_ptr<Progress> progress_;
  Guard guard_;
  OutputWatch outputs_;

  Phase phase_ = Phase::kIdle;
  Phase before_ = Phase::kIdle;  // what `open` found, in case no gradient follows
  Opening opening_ = Opening::kOutput;
  Finalization finalization_ = Finalization::kAutomatic;
  int closing_backward_ = -1;  // the end of this one closes the pass
  size_t arrivals_ = 0;        // gradients in this pass
  BucketRange unawaited_;      // buckets that leave with the first of them
  int divisor_ = 1;            // ranks that contribute to this pass
  // What is still to be done for this pass, each in the order of all ranks.
  std::deque<InFlight> in_flight_;
  std::deque<Mean> means_;        // to be published
  std::deque<BucketId> skipped_;  // held back because nobody used them in the last pass
  size_t num_handled_ = 0;        // buckets of this pass, from the first, that have left or need not
  int64_t forwards_ = 0;          // since the last pass
  int64_t passes_ = 0;            // that this rank took part in, whatever came of them
  uint64_t plan_fingerprint_ = 0;
  int64_t compared_pass_ = -1;              // the last one whose word all ranks have seen
  int64_t failed_pass_ = -1;                // the last one of which all ranks know that they disagree
  int64_t threw_ = 0;                       // 1: what this rank owed to the last pass went out as NaN, and nobody knows
  std::array<uint64_t, 3> agreed_sizes_{};  // mode, plan and hook that all ranks had when they last agreed
  std::string unusable_;                    // why no further collective may be issued; empty: all is well
  BackwardKind backward_kind_ = BackwardKind::kAccumulate;
  bool switch_reduces_ = true;                    // what the user's switch says now
  std::vector<uint32_t> expected_;                // scratch: reports to wait for, by ParamId
  std::vector<uint32_t> counted_;                 // reports in this pass, while a static graph is being recorded
  std::optional<std::vector<uint32_t>> firings_;  // of a static graph, once recorded
  PlanState plan_state_ = PlanState::kProvisional;
  std::vector<ParamId> arrival_;  // order of completed gradients in this pass
  std::vector<ParamId> last_arrival_;
  int64_t num_reductions_ = 0;  // passes that were published
  size_t num_sent_ = 0;         // buckets that left in the last pass
  StepTimes times_;             // of the running pass
  StepTimes last_times_;        // of the last published one
  bool publishes_ = true;
  std::function<int()> live_ranks_;
  std::vector<std::function<void()>> final_waits_;
  std::function<void(const std::string&)> error_observer_;
  std::function<void(Code, const std::string&)> warning_observer_;
  std::function<void(ParamId)> published_observer_;
  int64_t steps_without_unused_ = 0;
  std::set<Code> warned_;                    // said once already
  std::string missing_because_;              // why the last backward left gradients out
  std::set<std::vector<ParamId>> reported_;  // sets of local gradients named already
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> frozen_;
  std::vector<std::string> frozen_names_;

  AutogradHooks hooks_;  // last: destroyed first, so that nobody calls into a half-dead object
};

}  // namespace lockstep
