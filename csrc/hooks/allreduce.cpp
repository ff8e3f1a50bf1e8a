// The default hook: one all-reduce of the bucket as it is.
#include <array>

#include "hooks/registry.h"
#include "hooks/uncompressed.h"

namespace lockstep {
namespace {

constexpr std::string_view kDivisions[] = {"while_packing", "after_packing"};

class AllReduce final : public OneAllReduce {
 public:
  explicit AllReduce(const HookArgs& args)
      : OneAllReduce("allreduce", args.signature("allreduce"),
                     args.one_of("division", kDivisions) == kDivisions[0] ? Input::kSummand : Input::kUndivided) {}

  [[nodiscard]] bool averages_in_place() const override { return input() == Input::kSummand; }

  std::unique_ptr<PendingMean> start(const GradBucket& bucket, Communicator& comm) override {
    return bucket.undivided ? average_together(bucket, comm) : OneAllReduce::start(bucket, comm);
  }
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
