// The CUDA half of quantizing: from tensors to pointers.
#include <ATen/ATen.h>

#include "kernels/cuda/on_device.h"
#include "kernels/cuda/quantize.h"
#include "kernels/quantize.h"

namespace lockstep::cuda {
namespace {

BlockTable table_of(const BlockLayout& layout) {
  return {
      .filled = layout.filled.const_data_ptr<int32_t>(),
      .ids = layout.ids.defined() ? reinterpret_cast<const uint32_t*>(layout.ids.const_data_ptr<int32_t>()) : nullptr,
      .blocks_per_rank = layout.blocks_per_rank,
      .ranks = static_cast<int32_t>(layout.ranks)};
}

at::Tensor records_of(const BlockLayout& layout, int64_t count) {
  const int64_t bytes = layout.blocks_per_rank * (kQuantizationBlock + static_cast<int64_t>(sizeof(float)));
  return at::empty({count, bytes}, layout.filled.options().dtype(at::kChar));
}

char* bytes_of(const at::Tensor& records) { return static_cast<char*>(records.mutable_data_ptr()); }
const char* read_bytes_of(const at::Tensor& records) { return static_cast<const char*>(records.const_data_ptr()); }

}  // namespace

at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& layout, const at::Tensor& error, uint32_t key) {
  const OnDevice device(bucket);
  at::Tensor records = records_of(layout, layout.ranks);
  check(launch_quantize(table_of(layout), bucket.const_data_ptr(), element_of(bucket),
                        error.defined() ? error.mutable_data_ptr<float>() : nullptr, key, bytes_of(records),
                        device.stream()),
        bucket, "quantizing");
  return records;
}

at::Tensor sum_records(const at::Tensor& received, const BlockLayout& layout, int64_t rank, const at::Tensor& error,
                       uint32_t key) {
  const OnDevice device(received);
  at::Tensor record = records_of(layout, 1);
  const int64_t first_block = rank * layout.blocks_per_rank;
  const int64_t first = first_block * kQuantizationBlock;
  const bool keeps_error = error.defined() && first < error.numel();
  check(launch_sum_records(table_of(layout), read_bytes_of(received), first_block,
                           keeps_error ? error.mutable_data_ptr<float>() + first : nullptr,
                           keeps_error ? error.numel() - first : 0, key, bytes_of(record), device.stream()),
        received, "summing quantized gradients");
  return record;
}

void dequantize_bucket(const at::Tensor& records, const BlockLayout& layout, const at::Tensor& bucket) {
  const OnDevice device(bucket);
  check(launch_dequantize(table_of(layout), read_bytes_of(records), bucket.mutable_data_ptr(), element_of(bucket),
                          bucket.numel(), device.stream()),
        bucket, "dequantizing");
}

}  // namespace lockstep::cuda
