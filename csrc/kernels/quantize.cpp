#include "kernels/quantize.h"

#include <ATen/ATen.h>

#include <limits>

namespace lockstep {
namespace {

constexpr double kLargestCode = 127;
constexpr int64_t kLow32 = 0xffffffff;

at::Tensor blocks_of(const at::Tensor& data) { return data.view({-1, kQuantizationBlock}); }

at::Tensor scales_of(const at::Tensor& data) {
  const at::Tensor largest = blocks_of(data).abs().amax({1});
  return at::where(at::isfinite(largest), largest.div(kLargestCode), std::numeric_limits<float>::quiet_NaN());
}

/// Values in units of their block's scale; zero where that says nothing.
at::Tensor in_steps(const at::Tensor& data, const at::Tensor& scales) {
  const at::Tensor steps = blocks_of(data).div(scales.unsqueeze(1));
  return at::where(at::isfinite(steps), steps, 0).view(-1);
}

at::Tensor as_codes(const at::Tensor& steps) { return steps.clamp_(-kLargestCode, kLargestCode).to(at::kChar); }

/// One multiplication of `mixed`. The product may wrap around: its low 32 bits are right all the same.
at::Tensor times(const at::Tensor& words, int64_t factor) { return words.mul(factor).bitwise_and_(kLow32); }
at::Tensor shifted(const at::Tensor& words, int64_t bits) {
  return words.bitwise_xor(words.bitwise_right_shift(at::Scalar(bits)));
}

}  // namespace

Quantized quantize(const at::Tensor& data) {
  const at::Tensor scales = scales_of(data);
  return {as_codes(in_steps(data, scales).round_()), scales};
}

Quantized quantize(const at::Tensor& data, const at::Tensor& chance) {
  const at::Tensor scales = scales_of(data);
  return {as_codes(in_steps(data, scales).add_(chance).floor_()), scales};
}

at::Tensor dequantize(const at::Tensor& codes, const at::Tensor& scales) {
  std::vector<int64_t> sizes = scales.sizes().vec();
  sizes.push_back(kQuantizationBlock);
  return codes.to(at::kFloat).view(sizes).mul_(scales.unsqueeze(-1)).view(codes.sizes());
}

at::Tensor chances(const at::Tensor& ids, uint32_t key) {
  at::Tensor words = ids.bitwise_xor(at::Scalar(static_cast<int64_t>(key)));
  words = times(shifted(words, 16), 0x85ebca6bL);
  words = times(shifted(words, 13), 0xc2b2ae35L);
  words = shifted(words, 16);
  // 24 bits, so that the largest one is below 1 as a float.
  return words.bitwise_right_shift(at::Scalar(int64_t{8})).to(at::kFloat).mul_(1.0 / (1 << 24));
}

}  // namespace lockstep
