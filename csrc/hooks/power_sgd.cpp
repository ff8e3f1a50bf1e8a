// PowerSGD: a matrix travels as two thin factors, and what that leaves out is added to the next gradient.
//
// Source: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019 (arXiv:1905.13727), in the form of torch's hook: P = M Q
// and Q = M' P with M the gradient plus the error so far, P and Q summed over ranks, the mean P Q'.
#include <ATen/ATen.h>

#include <array>

#include "hooks/low_rank.h"
#include "hooks/named_memory.h"
#include "hooks/registry.h"
#include "hooks/relay.h"
#include "hooks/uncompressed.h"
#include "kernels/power_iteration.h"

namespace lockstep {
namespace {

enum class Split { kMatrixPerParameter, kMatrixPerBucket };

struct Settings {
  LowRankLimits limits;
  int64_t start_iteration;
  double epsilon;
  bool error_feedback;
  bool warm_start;
  bool batch_same_shape;
};

/// What one bucket keeps between steps.
struct LowRankBucket {
  LowRankLayout layout;
  std::unique_ptr<PowerIteration> iteration;
  at::Tensor m;  // the error between steps, the matrices to be compressed within one
  at::Tensor q;
};

/// One bucket on its way: first P, a flag per matrix and whatever is not compressed, then Q.
class CompressedMean final : public TwoRounds {
 public:
  CompressedMean(std::shared_ptr<Relay> relay, std::shared_ptr<LowRankBucket> bucket, at::Tensor memory,
                 Communicator& comm)
      : TwoRounds(std::move(relay)), bucket_(std::move(bucket)), comm_(&comm) {
    const LowRankLayout& layout = bucket_->layout;
    const auto flags = static_cast<int64_t>(layout.matrices.runs.size());
    const at::Tensor wire = at::empty({layout.p_numel + flags + layout.rest_numel}, bucket_->m.options());
    tensors_ = {.gradients = std::move(memory),
                .m = bucket_->m,
                .p = wire.narrow(0, 0, layout.p_numel),
                .q = bucket_->q,
                .flags = wire.narrow(0, layout.p_numel, flags)};
    rest_ = wire.narrow(0, layout.p_numel + flags, layout.rest_numel);
    bucket_->iteration->first(tensors_);
    gather(rest_, tensors_.gradients, layout.rest);
    transfer_ = comm.sum(wire);
  }

 protected:
  void start_second() override {
    transfer_->wait();
    compressed_ = bucket_->iteration->second(tensors_);
    if (compressed_) {
      transfer_ = comm_->sum(tensors_.q);
    } else {  // the gradients themselves bring infinity and NaN to every rank
      tensors_.gradients.div_(comm_->size());
      transfer_ = comm_->sum(tensors_.gradients);
    }
  }

  at::Tensor finish() override {
    transfer_->wait();
    if (compressed_) {
      tensors_.q.div_(comm_->size());
      bucket_->iteration->finish(tensors_);
      if (rest_.numel() > 0) rest_.div_(comm_->size());
      scatter(tensors_.gradients, rest_, bucket_->layout.rest);
    }
    return std::move(tensors_.gradients);
  }

 private:
  std::shared_ptr<LowRankBucket> bucket_;
  FactorTensors tensors_;
  at::Tensor rest_;  // its sum over ranks travels with P
  Communicator* comm_;
  TransferPtr transfer_;
  bool compressed_ = true;
};

class PowerSgd final : public CommHook {
 public:
  PowerSgd(std::string name, Split split, const HookArgs& args)
      : name_(std::move(name)),
        signature_(args.signature(name_)),
        split_(split),
        settings_{.limits = {.rank = args.integer("rank", 1, 32),
                             .min_compression_rate = args.at_least_zero("min_compression_rate")},
                  .start_iteration = args.integer("start_iteration", 0, INT64_MAX),
                  .epsilon = args.at_least_zero("epsilon"),
                  .error_feedback = args.flag("error_feedback"),
                  .warm_start = args.flag("warm_start"),
                  .batch_same_shape = args.flag("batch_same_shape")},
        seeds_(args.integer("seed", 0, UINT32_MAX)) {}

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::string signature() const override { return signature_; }
  [[nodiscard]] int64_t slot_alignment() const override {
    return split_ == Split::kMatrixPerBucket ? 1 : kSlotAlignmentBytes;
  }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    rank_ = comm.rank();
    if (step_ < settings_.start_iteration || !can_be_compressed(bucket, comm)) return average_in_place(bucket, comm);
    const at::NoGradGuard no_grad;
    const std::shared_ptr<LowRankBucket> state = prepared(bucket);
    const LowRankLayout& layout = state->layout;
    stats_.numel_before += layout.numel_before;
    stats_.numel_after += layout.numel_after;
    if (layout.matrices.groups.empty()) return average_in_place(bucket, comm);
    return std::make_unique<CompressedMean>(relay_, state, bucket.memory, comm);
  }

  void on_new_plan() override { buckets_.clear(); }
  void on_pass_ended() override { ++step_; }

  [[nodiscard]] HookStats stats() const override {
    HookStats stats = stats_;
    stats.steps = step_;
    return stats;
  }

  [[nodiscard]] HookState state() const override {
    HookState state{{name_ + "/step", saved_number(step_)},
                    {name_ + "/saved_by_rank", saved_number(rank_)},
                    {name_ + "/seeds", seeds_.state()},
                    {name_ + "/rank", saved_number(settings_.limits.rank)},
                    {name_ + "/numel_before", saved_number(stats_.numel_before)},
                    {name_ + "/numel_after", saved_number(stats_.numel_after)}};
    if (settings_.error_feedback) errors_.save("error/", state);
    if (settings_.warm_start) factors_.save("factor/", state);
    return state;
  }

  std::vector<std::string> load_state(const HookState& state, std::span<const HookSubject> subjects,
                                      int rank) override {
    FittingState fits = fitting(state, name_, subjects, rank);
    if (number_in(state, name_ + "/rank") != settings_.limits.rank) {
      fits.factors.clear();
      fits.complaints.push_back(fmt::format(
          "the state of the comm hook '{}' was saved with rank {} and is loaded with rank {}: factors start anew.",
          name_, number_in(state, name_ + "/rank"), settings_.limits.rank));
    }
    FactorSeeds seeds(0);
    if (const auto saved = state.find(name_ + "/seeds"); saved != state.end()) seeds.set_state(saved->second);
    const int64_t step = number_in(state, name_ + "/step");
    const HookStats stats{.numel_before = number_in(state, name_ + "/numel_before"),
                          .numel_after = number_in(state, name_ + "/numel_after")};
    seeds_ = seeds;
    step_ = step;
    stats_ = stats;
    errors_.replace(fits.errors);
    factors_.replace(fits.factors);
    buckets_.clear();
    return std::move(fits.complaints);
  }

 private:
  /// The bucket's memory, with Q drawn if there is none to start from.
  std::shared_ptr<LowRankBucket> prepared(const GradBucket& bucket) {
    std::shared_ptr<LowRankBucket>& state = buckets_[bucket.id];
    bool draw = !settings_.warm_start;
    if (!state) {
      state = std::make_shared<LowRankBucket>();
      LowRankLayout& layout = state->layout;
      layout = split_ == Split::kMatrixPerBucket
                   ? matrix_per_bucket(bucket.members(), bucket.memory.numel(), settings_.limits)
                   : matrix_per_parameter(bucket.members(), settings_.limits);
      const auto type = bucket.memory.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      const at::TensorOptions options = bucket.memory.options().dtype(type);
      draw = draw || layout.factors.empty();
      for (const NamedSlice& slice : layout.factors) draw = draw || !factors_.knows(slice);
      state->m = settings_.error_feedback ? errors_.lay_out(layout.errors, layout.m_numel, options)
                                          : at::zeros({layout.m_numel}, options);
      state->q = factors_.lay_out(layout.factors, layout.q_numel, options);
      if (!layout.matrices.groups.empty()) {
        state->iteration = PowerIteration::make(
            layout.matrices, bucket.memory, {.epsilon = settings_.epsilon, .error_feedback = settings_.error_feedback});
      }
    }
    // Torch takes a seed for a bucket without matrices too.
    if (draw) draw_factors(state->q, state->layout.matrices.groups, seeds_.next(), settings_.batch_same_shape);
    return state;
  }

  std::string name_;
  std::string signature_;
  Split split_;
  Settings settings_;
  FactorSeeds seeds_;
  std::shared_ptr<Relay> relay_ = std::make_shared<Relay>();
  NamedMemory errors_;
  NamedMemory factors_;
  std::map<BucketId, std::shared_ptr<LowRankBucket>> buckets_;
  int64_t step_ = 0;
  int rank_ = 0;
  HookStats stats_;
};

}  // namespace

std::span<const HookParam> power_sgd_params() {
  static const std::array<HookParam, 8> params{{
      {"rank", int64_t{1}, "columns of the factors, 1 to 32; cut to the smaller side of each matrix"},
      {"start_iteration", int64_t{1000}, "steps that are not compressed, 0 or more"},
      {"min_compression_rate", 2.0, "a matrix that shrinks by less is not compressed"},
      {"epsilon", 0.0, "added to norms when columns are made orthonormal, with rank 1 and 2"},
      {"error_feedback", true, "what compression leaves out is added to the next gradient"},
      {"warm_start", true, "Q starts from that of the last step"},
      {"batch_same_shape", false, "draws the first Q of equal shapes as one, as torch does with that option"},
      {"seed", int64_t{0}, "of the first Q, 0 to 2**32 - 1; the same on all ranks"},
  }};
  return params;
}

std::unique_ptr<CommHook> make_power_sgd(const HookArgs& args) {
  return std::make_unique<PowerSgd>("power_sgd", Split::kMatrixPerParameter, args);
}

std::unique_ptr<CommHook> make_batched_power_sgd(const HookArgs& args) {
  return std::make_unique<PowerSgd>("batched_power_sgd", Split::kMatrixPerBucket, args);
}

}  // namespace lockstep
