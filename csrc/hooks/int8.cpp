// A quarter of the bytes: 8-bit integers with one fp32 scale per 256 elements, exchanged so that each element is
// quantized twice whatever the number of ranks.
//
// Every rank quantizes its bucket and sends chunk r to rank r, which sums the chunks in fp32, quantizes the sum and
// sends it to all. Source: Wang et al., ZeRO++ (arXiv:2306.10209), quantized gradient communication; error feedback as
// in Seide et al., 1-bit SGD (Interspeech 2014).
#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "core/fingerprint.h"
#include "hooks/named_memory.h"
#include "hooks/registry.h"
#include "hooks/relay.h"
#include "hooks/uncompressed.h"
#include "kernels/quantize.h"

namespace lockstep {
namespace {

constexpr std::string_view kRoundings[] = {"nearest", "stochastic"};
/// Slots start at a multiple of a block, of any dtype: no block is of two parameters, and none depends on the plan.
constexpr int64_t kAlignmentBytes = kQuantizationBlock * 8;

/// What one bucket keeps between steps.
struct QuantizedBucket {
  BlockLayout layout;
  at::Tensor error;  // undefined without feedback
};

/// The random numbers of the two rounds.
using Keys = std::array<uint32_t, 2>;

class QuantizedMean final : public TwoRounds {
 public:
  QuantizedMean(std::shared_ptr<Relay> relay, std::shared_ptr<QuantizedBucket> bucket, at::Tensor memory, Keys keys,
                Communicator& comm)
      : TwoRounds(std::move(relay)),
        bucket_(std::move(bucket)),
        memory_(std::move(memory)),
        keys_(keys),
        comm_(&comm),
        sent_(quantize_bucket(memory_, bucket_->layout, bucket_->error, keys_[0])),
        received_(at::empty_like(sent_)),
        transfer_(comm.all_to_all(received_, sent_)) {}

 protected:
  void start_second() override {
    transfer_->wait();
    // What the others do not get of our blocks now, they get with our next gradient: their error is of this rank alone.
    sent_ = sum_records(received_, bucket_->layout, comm_->rank(), bucket_->error, keys_[1]);
    transfer_ = comm_->all_gather(received_, sent_);
  }

  at::Tensor finish() override {
    transfer_->wait();
    dequantize_bucket(received_, bucket_->layout, memory_);
    return std::move(memory_);
  }

 private:
  std::shared_ptr<QuantizedBucket> bucket_;
  at::Tensor memory_;
  Keys keys_;
  Communicator* comm_;
  at::Tensor sent_;
  at::Tensor received_;
  TransferPtr transfer_;
};

class Int8 final : public CommHook {
 public:
  explicit Int8(const HookArgs& args)
      : signature_(args.signature("int8")),
        stochastic_(args.one_of("rounding", kRoundings) == kRoundings[1]),
        error_feedback_(args.flag("error_feedback")),
        seed_(static_cast<uint32_t>(args.integer("seed", 0, UINT32_MAX))) {}

  [[nodiscard]] std::string name() const override { return "int8"; }
  [[nodiscard]] std::string signature() const override { return signature_; }
  [[nodiscard]] Input input() const override { return Input::kSummand; }
  [[nodiscard]] int64_t slot_alignment() const override { return kAlignmentBytes; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    rank_ = comm.rank();
    const at::Tensor& memory = bucket.memory;
    if (!can_be_compressed(bucket, comm)) return sum_in_place(bucket, comm);
    const at::NoGradGuard no_grad;
    const Keys keys{key(comm.rank(), 0), key(comm.rank(), 1)};
    return std::make_unique<QuantizedMean>(relay_, prepared(bucket, comm.size()), memory, keys, comm);
  }

  void on_new_plan() override { buckets_.clear(); }
  void on_pass_ended() override { ++step_; }

  [[nodiscard]] HookStats stats() const override { return {.steps = step_}; }

  [[nodiscard]] HookState state() const override {
    HookState state{{"int8/step", saved_number(step_)}, {"int8/saved_by_rank", saved_number(rank_)}};
    if (error_feedback_) errors_.save("error/", state);
    return state;
  }

  std::vector<std::string> load_state(const HookState& state, std::span<const HookSubject> subjects,
                                      int rank) override {
    FittingState fits = fitting(state, "int8", subjects, rank);
    step_ = number_in(state, "int8/step");
    errors_.replace(fits.errors);
    buckets_.clear();
    return std::move(fits.complaints);
  }

 private:
  /// Rounding errors must not depend on each other: not over steps, ranks or rounds.
  [[nodiscard]] uint32_t key(int rank, uint32_t round) const {
    return mixed(mixed(mixed(seed_ ^ static_cast<uint32_t>(step_)) ^ static_cast<uint32_t>(rank)) ^ round);
  }

  std::shared_ptr<QuantizedBucket> prepared(const GradBucket& bucket, int ranks) {
    std::shared_ptr<QuantizedBucket>& state = buckets_[bucket.id];
    if (state) return state;
    state = std::make_shared<QuantizedBucket>();
    const std::vector<NamedSlice> slices = slices_of(bucket.members());
    const int64_t blocks = (bucket.memory.numel() + kQuantizationBlock - 1) / kQuantizationBlock;
    BlockLayout& layout = state->layout;
    layout.ranks = ranks;
    layout.blocks_per_rank = (blocks + ranks - 1) / ranks;
    const at::Tensor filled = at::zeros({layout.blocks_per_rank * ranks}, at::dtype(at::kInt));
    const at::Tensor ids = at::zeros_like(filled);
    auto* of_filled = filled.mutable_data_ptr<int32_t>();
    auto* of_ids = ids.mutable_data_ptr<int32_t>();
    for (const NamedSlice& slice : slices) {
      const auto name = static_cast<uint32_t>(fingerprint(slice.name));
      for (int64_t done = 0; done < slice.numel; done += kQuantizationBlock) {
        const int64_t block = (slice.offset + done) / kQuantizationBlock;
        of_filled[block] = static_cast<int32_t>(std::min(kQuantizationBlock, slice.numel - done));
        of_ids[block] = static_cast<int32_t>(name + static_cast<uint32_t>(done));
      }
    }
    layout.filled = filled.to(bucket.memory.device());
    if (stochastic_) layout.ids = ids.to(bucket.memory.device());
    if (error_feedback_) {
      state->error = errors_.lay_out(slices, bucket.memory.numel(), bucket.memory.options().dtype(at::kFloat));
    }
    return state;
  }

  std::string signature_;
  bool stochastic_;
  bool error_feedback_;
  uint32_t seed_;
  std::shared_ptr<Relay> relay_ = std::make_shared<Relay>();
  NamedMemory errors_;
  std::map<BucketId, std::shared_ptr<QuantizedBucket>> buckets_;
  int64_t step_ = 0;
  int rank_ = 0;
};

}  // namespace

std::span<const HookParam> int8_params() {
  static const std::array<HookParam, 3> params{{
      {"rounding", std::string(kRoundings[0]), "'nearest', or 'stochastic', which is right in the mean"},
      {"error_feedback", false, "what rounding leaves out is added to the next gradient"},
      {"seed", int64_t{0}, "of stochastic rounding, 0 to 2**32 - 1"},
  }};
  return params;
}

std::unique_ptr<CommHook> make_int8(const HookArgs& args) { return std::make_unique<Int8>(args); }

}  // namespace lockstep
