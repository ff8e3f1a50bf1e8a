// The default hook: one all-reduce of the bucket as it is.
#include <array>

#include "hooks/registry.h"
#include "hooks/uncompressed.h"

namespace lockstep {
namespace {

constexpr std::string_view kDivisions[] = {"while_packing", "after_packing"};

class AllReduce final : public CommHook {
 public:
  explicit AllReduce(const HookArgs& args)
      : signature_(args.signature("allreduce")),
        input_(args.one_of("division", kDivisions) == kDivisions[0] ? Input::kSummand : Input::kUndivided) {}

  [[nodiscard]] std::string name() const override { return "allreduce"; }
  [[nodiscard]] std::string signature() const override { return signature_; }
  [[nodiscard]] Input input() const override { return input_; }
  /// A sum of three or more may depend on where in the bucket it lies: as torch does, without gaps.
  [[nodiscard]] int64_t slot_alignment() const override { return input_ == Input::kSummand ? kSlotAlignmentBytes : 1; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    return input_ == Input::kSummand ? sum_in_place(bucket, comm) : average_in_place(bucket, comm);
  }

 private:
  std::string signature_;
  Input input_;
};

}  // namespace

std::span<const HookParam> allreduce_params() {
  static const std::array<HookParam, 1> params{
      {{"division", std::string(kDivisions[0]),
        "'while_packing' multiplies by 1/ranks in the pass that packs; 'after_packing' divides in a pass of its own, "
        "which gives the last bit of torch's allreduce_hook"}}};
  return params;
}

std::unique_ptr<CommHook> make_allreduce(const HookArgs& args) { return std::make_unique<AllReduce>(args); }

}  // namespace lockstep
