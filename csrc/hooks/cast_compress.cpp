// Half the bytes on the wire: gradients are cast to fp16 or bf16 in the pass that packs them, and back in the one that
// unpacks.
#include <array>

#include "hooks/registry.h"
#include "hooks/uncompressed.h"

namespace lockstep {
namespace {

constexpr std::string_view kOrders[] = {"divide_first", "cast_first"};

class CastCompress final : public OneAllReduce {
 public:
  CastCompress(const std::string& name, at::ScalarType wire, const HookArgs& args)
      : OneAllReduce(name, args.signature(name),
                     args.one_of("order", kOrders) == kOrders[0] ? Input::kSummand : Input::kUndivided),
        wire_(wire) {}

  [[nodiscard]] at::ScalarType wire_type(const BucketType& type) const override {
    if (type.complex) return type.dtype;
    if (input() == Input::kUndivided) return wire_;  // torch's hook casts whatever it gets, alone or not
    const bool gains = c10::elementSize(type.dtype) > c10::elementSize(wire_);
    return gains && type.ranks > 1 ? wire_ : type.dtype;
  }

 private:
  at::ScalarType wire_;
};

}  // namespace

std::span<const HookParam> cast_params() {
  static const std::array<HookParam, 1> params{
      {{"order", std::string(kOrders[0]),
        "'divide_first' divides by the ranks in fp32 and casts then, so that nothing overflows where the mean would "
        "not; 'cast_first' gives the bits of torch's hook"}}};
  return params;
}

std::unique_ptr<CommHook> make_fp16(const HookArgs& args) {
  return std::make_unique<CastCompress>("fp16", at::kHalf, args);
}

std::unique_ptr<CommHook> make_bf16(const HookArgs& args) {
  return std::make_unique<CastCompress>("bf16", at::kBFloat16, args);
}

}  // namespace lockstep
