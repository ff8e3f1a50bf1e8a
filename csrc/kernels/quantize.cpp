#include "kernels/quantize.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace lockstep {
namespace {

constexpr float kLargestCode = 127;
constexpr int64_t kGrain = 64;  // blocks that are worth a thread

/// The elements of a block, in fp32.
struct Block {
  float values[kQuantizationBlock];
};

int64_t record_bytes(const BlockLayout& layout) {
  return layout.blocks_per_rank * (kQuantizationBlock + static_cast<int64_t>(sizeof(float)));
}

/// A block's codes, and where its scale lies, within a record.
int8_t* codes_at(int8_t* record, int64_t block) { return record + block * kQuantizationBlock; }
int8_t* scale_at(int8_t* record, const BlockLayout& layout, int64_t block) {
  return record + layout.blocks_per_rank * kQuantizationBlock + block * static_cast<int64_t>(sizeof(float));
}

/// Largest absolute value by 127; NaN where a value is not finite. Compared as integers, which order absolute values
/// alike and lets the compiler use vectors.
float scale_of(const Block& block) {
  constexpr uint32_t kAbsolute = 0x7fffffffU;
  constexpr uint32_t kInfinity = 0x7f800000U;
  uint32_t largest = 0;
  for (const float value : block.values) {
    const uint32_t bits = std::bit_cast<uint32_t>(value) & kAbsolute;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(largest) / kLargestCode;
}

/// To the nearest integer, ties to even, for |value| < 2**22: the sum leaves no bits below one.
float nearest(float value) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2**23
  return (value + kShift) - kShift;
}

float rounded_down(float value) {
  const auto toward_zero = static_cast<float>(static_cast<int32_t>(value));
  return toward_zero > value ? toward_zero - 1 : toward_zero;
}

/// Writes the codes and the scale of a block, which becomes what that leaves out, where it is a number.
/// @param id  of the first element; null: to the nearest code.
void write_codes(Block& block, const int32_t* id, uint32_t key, int8_t* codes, int8_t* scale_bytes) {
  const float scale = scale_of(block);
  std::memcpy(scale_bytes, &scale, sizeof scale);
  if (!(scale > 0)) {  // zeros, values too small for a scale, or not finite ones: all codes are 0
    std::memset(codes, 0, kQuantizationBlock);
    if (std::isnan(scale)) std::fill(std::begin(block.values), std::end(block.values), 0.0F);
    return;
  }
  float steps[kQuantizationBlock];
  for (int64_t k = 0; k < kQuantizationBlock; ++k) steps[k] = block.values[k] / scale;
  if (id == nullptr) {
    for (float& step : steps) step = nearest(step);
  } else {
    const auto first = static_cast<uint32_t>(*id);
    for (uint32_t k = 0; k < kQuantizationBlock; ++k) {
      steps[k] = rounded_down(steps[k] + chance_of(mixed((first + k) ^ key)));
    }
  }
  for (int64_t k = 0; k < kQuantizationBlock; ++k) {
    const float step = std::min(std::max(steps[k], -kLargestCode), kLargestCode);
    codes[k] = static_cast<int8_t>(static_cast<int32_t>(step));
    block.values[k] -= step * scale;
  }
}

/// The values that a block's codes stand for.
void read_values(const int8_t* codes, const int8_t* scale_bytes, Block& block) {
  float scale = 0;
  std::memcpy(&scale, scale_bytes, sizeof scale);
  for (int64_t k = 0; k < kQuantizationBlock; ++k) block.values[k] = static_cast<float>(codes[k]) * scale;
}

const int32_t* ids_of(const BlockLayout& layout, int64_t block) {
  return layout.ids.defined() ? layout.ids.const_data_ptr<int32_t>() + block : nullptr;
}

/// Calls `body(block)` for [0, count), on several threads.
template <typename Body>
void for_blocks(int64_t count, const Body& body) {
  at::parallel_for(0, count, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) body(block);
  });
}

}  // namespace

at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& layout, const at::Tensor& error, uint32_t key) {
  if (!bucket.is_cpu()) return cuda::quantize_bucket(bucket, layout, error, key);
  const at::Tensor records = at::empty({layout.ranks, record_bytes(layout)}, at::dtype(at::kChar));
  auto* out = records.mutable_data_ptr<int8_t>();
  auto* left_out = error.defined() ? error.mutable_data_ptr<float>() : nullptr;
  const auto* filled = layout.filled.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, bucket.scalar_type(), "lockstep_quantize", [&] {
    const auto* data = bucket.const_data_ptr<scalar_t>();
    for_blocks(layout.blocks_per_rank * layout.ranks, [&](int64_t index) {
      const int64_t first = index * kQuantizationBlock;
      Block block{};  // gaps are zeros, whatever NaN of another rank has come into them
      for (int64_t k = 0; k < filled[index]; ++k) block.values[k] = static_cast<float>(data[first + k]);
      if (left_out != nullptr) {
        for (int64_t k = 0; k < filled[index]; ++k) block.values[k] += left_out[first + k];
      }
      int8_t* record = out + index / layout.blocks_per_rank * record_bytes(layout);
      const int64_t in_record = index % layout.blocks_per_rank;
      write_codes(block, ids_of(layout, index), key, codes_at(record, in_record), scale_at(record, layout, in_record));
      if (left_out != nullptr) std::copy_n(block.values, filled[index], left_out + first);
    });
  });
  return records;
}

at::Tensor sum_records(const at::Tensor& received, const BlockLayout& layout, int64_t rank, const at::Tensor& error,
                       uint32_t key) {
  if (!received.is_cpu()) return cuda::sum_records(received, layout, rank, error, key);
  at::Tensor record = at::empty({1, record_bytes(layout)}, at::dtype(at::kChar));
  auto* in = const_cast<int8_t*>(received.const_data_ptr<int8_t>());
  auto* out = record.mutable_data_ptr<int8_t>();
  const int64_t first_block = rank * layout.blocks_per_rank;
  for_blocks(layout.blocks_per_rank, [&](int64_t index) {
    Block sum{};
    for (int64_t of_rank = 0; of_rank < layout.ranks; ++of_rank) {
      int8_t* from = in + of_rank * record_bytes(layout);
      Block summand;
      read_values(codes_at(from, index), scale_at(from, layout, index), summand);
      for (int64_t k = 0; k < kQuantizationBlock; ++k) sum.values[k] += summand.values[k];
    }
    write_codes(sum, ids_of(layout, first_block + index), key, codes_at(out, index), scale_at(out, layout, index));
    if (!error.defined()) return;
    const int64_t first = (first_block + index) * kQuantizationBlock;
    auto* left_out = error.mutable_data_ptr<float>();
    const int64_t count = std::min(kQuantizationBlock, error.numel() - first);
    for (int64_t k = 0; k < count; ++k) left_out[first + k] += sum.values[k];
  });
  return record;
}

void dequantize_bucket(const at::Tensor& records, const BlockLayout& layout, const at::Tensor& bucket) {
  if (!bucket.is_cpu()) return cuda::dequantize_bucket(records, layout, bucket);
  auto* in = const_cast<int8_t*>(records.const_data_ptr<int8_t>());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, bucket.scalar_type(), "lockstep_dequantize", [&] {
    auto* data = bucket.mutable_data_ptr<scalar_t>();
    for_blocks((bucket.numel() + kQuantizationBlock - 1) / kQuantizationBlock, [&](int64_t index) {
      int8_t* record = in + index / layout.blocks_per_rank * record_bytes(layout);
      const int64_t in_record = index % layout.blocks_per_rank;
      Block block;
      read_values(codes_at(record, in_record), scale_at(record, layout, in_record), block);
      const int64_t first = index * kQuantizationBlock;
      const int64_t count = std::min(kQuantizationBlock, bucket.numel() - first);
      for (int64_t k = 0; k < count; ++k) data[first + k] = static_cast<scalar_t>(block.values[k]);
    });
  });
}

}  // namespace lockstep
