#include "kernels/quantize.h"

#include <ATen/ATen.h>

#include <algorithm>
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

/// The random numbers of blocks [first, first + count).
at::Tensor chances_of(const BlockLayout& layout, int64_t first, int64_t count, uint32_t key) {
  const at::Tensor starts = layout.ids.narrow(0, first, count).to(at::kLong).unsqueeze(1);
  const at::Tensor ids = starts.add(at::arange(kQuantizationBlock, starts.options()));
  return chances(ids.bitwise_and_(kLow32).view(-1), key);
}

/// Quantizes blocks [first, ...) of a bucket.
Quantized rounded(const at::Tensor& data, const BlockLayout& layout, int64_t first, uint32_t key) {
  if (!layout.ids.defined()) return quantize(data);
  return quantize(data, chances_of(layout, first, data.numel() / kQuantizationBlock, key));
}

/// `count` records: codes, and the bytes of their scales behind them.
at::Tensor as_records(const Quantized& quantized, int64_t count) {
  const at::Tensor bytes = quantized.scales.view(at::kChar);
  return at::cat({quantized.codes.view({count, -1}), bytes.view({count, -1})}, 1);
}

/// The values of all records, [ranks, elements].
at::Tensor values_of(const at::Tensor& records, const BlockLayout& layout) {
  const int64_t elements = layout.blocks_per_rank * kQuantizationBlock;
  const at::Tensor rows = records.view({layout.ranks, -1});
  const at::Tensor codes = rows.narrow(1, 0, elements).contiguous();
  const at::Tensor scales = rows.narrow(1, elements, rows.size(1) - elements).contiguous().view(at::kFloat);
  return dequantize(codes, scales);
}

/// What quantizing has left out; nothing where that is not a number.
at::Tensor left_out(const at::Tensor& exact, const Quantized& sent) {
  const at::Tensor difference = exact.sub(dequantize(sent.codes, sent.scales));
  return at::where(at::isfinite(difference), difference, 0);
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

at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& layout, const at::Tensor& error, uint32_t key) {
  if (!bucket.is_cpu()) return cuda::quantize_bucket(bucket, layout, error, key);
  const at::Tensor data = at::zeros({layout.filled.numel() * kQuantizationBlock}, at::dtype(at::kFloat));
  at::Tensor used = data.narrow(0, 0, bucket.numel());
  used.copy_(bucket);
  // NaN of another rank may have come into a gap, and would fill the block.
  const at::Tensor in_block = at::arange(kQuantizationBlock, layout.filled.options());
  blocks_of(data).masked_fill_(in_block.ge(layout.filled.unsqueeze(1)), 0);
  if (error.defined()) used.add_(error);
  const Quantized sent = rounded(data, layout, 0, key);
  if (error.defined()) {
    at::Tensor out = error;
    out.copy_(left_out(data, sent).narrow(0, 0, out.numel()));
  }
  return as_records(sent, layout.ranks);
}

at::Tensor sum_records(const at::Tensor& received, const BlockLayout& layout, int64_t rank, const at::Tensor& error,
                       uint32_t key) {
  if (!received.is_cpu()) return cuda::sum_records(received, layout, rank, error, key);
  const at::Tensor sum = values_of(received, layout).sum(0);
  const Quantized sent = rounded(sum, layout, rank * layout.blocks_per_rank, key);
  const int64_t first = rank * layout.blocks_per_rank * kQuantizationBlock;
  if (error.defined() && first < error.numel()) {
    at::Tensor own = error.narrow(0, first, std::min(sum.numel(), error.numel() - first));
    own.add_(left_out(sum, sent).narrow(0, 0, own.numel()));
  }
  return as_records(sent, 1);
}

void dequantize_bucket(const at::Tensor& records, const BlockLayout& layout, const at::Tensor& bucket) {
  if (!bucket.is_cpu()) return cuda::dequantize_bucket(records, layout, bucket);
  at::Tensor out = bucket;
  out.copy_(values_of(records, layout).view(-1).narrow(0, 0, bucket.numel()));
}

}  // namespace lockstep
