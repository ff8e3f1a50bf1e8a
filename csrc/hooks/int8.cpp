// A quarter of the bytes: 8-bit integers with one fp32 scale per 256 elements, exchanged so that each element is
// quantized twice whatever the number of ranks.
//
// Every rank quantizes its bucket and sends chunk r to rank r, which sums the chunks in fp32, quantizes the sum and
// sends it to all. Source: Wang et al., ZeRO++ (arXiv:2306.10209), quantized gradient communication; error feedback as
// in Seide et al., 1-bit SGD (Interspeech 2014).
#include <ATen/ATen.h>

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
/// Slots start at a multiple of a block for fp32 and half types, so that blocks do not depend on the plan.
constexpr int64_t kAlignmentBytes = kQuantizationBlock * 4;
constexpr int64_t kScaleBytes = 4;

/// What one bucket keeps between steps.
struct QuantizedBucket {
  at::Tensor gaps;   // [padded bucket], bool: elements that belong to no parameter
  at::Tensor error;  // [bucket], or undefined
  at::Tensor ids;    // [padded bucket], or undefined: which element of which parameter it is
};

/// One part of a bucket on the wire: codes, and the bytes of their scales behind them.
at::Tensor as_records(const Quantized& quantized, int64_t count) {
  const at::Tensor bytes = quantized.scales.view(at::kChar);
  return at::cat({quantized.codes.view({count, -1}), bytes.view({count, -1})}, 1);
}

/// The values of [count] records, [count, elements].
at::Tensor values_of(const at::Tensor& records, int64_t elements) {
  const at::Tensor codes = records.narrow(1, 0, elements).contiguous();
  const int64_t bytes = elements / kQuantizationBlock * kScaleBytes;
  const at::Tensor scales = records.narrow(1, elements, bytes).contiguous().view(at::kFloat);
  return dequantize(codes, scales);
}

/// What quantizing has left out; nothing where that is not a number.
at::Tensor left_out(const at::Tensor& exact, const at::Tensor& sent) {
  const at::Tensor difference = exact.sub(sent);
  return at::where(at::isfinite(difference), difference, 0);
}

class QuantizedMean final : public TwoRounds {
 public:
  /// @param data  fp32, padded to one chunk of whole blocks per rank.
  /// @param keys  of the random numbers of both rounds; rounds to nearest without.
  QuantizedMean(std::shared_ptr<Relay> relay, std::shared_ptr<QuantizedBucket> bucket, at::Tensor memory,
                const at::Tensor& data, std::optional<std::array<uint32_t, 2>> keys, Communicator& comm)
      : TwoRounds(std::move(relay)),
        bucket_(std::move(bucket)),
        memory_(std::move(memory)),
        keys_(keys),
        comm_(&comm),
        chunk_(data.numel() / comm.size()) {
    const Quantized mine = round(data, 0, 0);
    if (bucket_->error.defined()) {
      const int64_t numel = bucket_->error.numel();
      bucket_->error.copy_(left_out(data, dequantize(mine.codes, mine.scales)).narrow(0, 0, numel));
    }
    sent_ = as_records(mine, comm.size());
    received_ = at::empty_like(sent_);
    transfer_ = comm.all_to_all(received_, sent_);
  }

 protected:
  void start_second() override {
    transfer_->wait();
    const at::Tensor sum = values_of(received_, chunk_).sum(0);
    const int64_t first = chunk_ * comm_->rank();
    const Quantized mine = round(sum, 1, first);
    if (bucket_->error.defined() && first < bucket_->error.numel()) {
      // A summand of this rank: what the others do not get now, they get with our next gradient.
      at::Tensor error = bucket_->error.narrow(0, first, std::min(chunk_, bucket_->error.numel() - first));
      error.add_(left_out(sum, dequantize(mine.codes, mine.scales)).narrow(0, 0, error.numel()));
    }
    sent_ = as_records(mine, 1);
    transfer_ = comm_->all_gather(received_, sent_);
  }

  at::Tensor finish() override {
    transfer_->wait();
    memory_.copy_(values_of(received_, chunk_).view(-1).narrow(0, 0, memory_.numel()));
    return std::move(memory_);
  }

 private:
  /// @param first  of `data`, in the bucket.
  [[nodiscard]] Quantized round(const at::Tensor& data, size_t round, int64_t first) const {
    if (!keys_) return quantize(data);
    return quantize(data, chances(bucket_->ids.narrow(0, first, data.numel()), (*keys_)[round]));
  }

  std::shared_ptr<QuantizedBucket> bucket_;
  at::Tensor memory_;
  std::optional<std::array<uint32_t, 2>> keys_;
  Communicator* comm_;
  int64_t chunk_;  // elements that one rank sums
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
    const int64_t blocks = (memory.numel() + kQuantizationBlock - 1) / kQuantizationBlock;
    const int64_t blocks_per_rank = (blocks + comm.size() - 1) / comm.size();
    const at::Tensor data =
        at::zeros({blocks_per_rank * kQuantizationBlock * comm.size()}, memory.options().dtype(at::kFloat));
    data.narrow(0, 0, memory.numel()).copy_(memory);
    const std::shared_ptr<QuantizedBucket> state = prepared(bucket, data);
    data.masked_fill_(state->gaps, 0);  // NaN of another rank may have come there, and would fill the block
    if (error_feedback_) data.narrow(0, 0, memory.numel()).add_(state->error);
    std::optional<std::array<uint32_t, 2>> keys;
    if (stochastic_) keys = {key(comm.rank(), 0), key(comm.rank(), 1)};
    return std::make_unique<QuantizedMean>(relay_, state, memory, data, keys, comm);
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

  std::shared_ptr<QuantizedBucket> prepared(const GradBucket& bucket, const at::Tensor& data) {
    std::shared_ptr<QuantizedBucket>& state = buckets_[bucket.id];
    if (state) return state;
    state = std::make_shared<QuantizedBucket>();
    const std::vector<NamedSlice> slices = slices_of(bucket.members());
    state->gaps = at::ones({data.numel()}, data.options().dtype(at::kBool));
    for (const NamedSlice& slice : slices) state->gaps.narrow(0, slice.offset, slice.numel).zero_();
    if (error_feedback_) state->error = errors_.lay_out(slices, bucket.memory.numel(), data.options());
    if (stochastic_) {
      state->ids = at::zeros({data.numel()}, data.options().dtype(at::kLong));
      for (const NamedSlice& slice : slices) {
        const auto first = static_cast<int64_t>(fingerprint(slice.name) & 0xffffffffU);
        state->ids.narrow(0, slice.offset, slice.numel)
            .copy_(at::arange(first, first + slice.numel, state->ids.options()).bitwise_and_(0xffffffffL));
      }
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
