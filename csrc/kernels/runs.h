// Moves many runs of elements between two flat tensors, with a cast where their dtypes differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace lockstep {

/// Elements [bucket, bucket + numel) of a bucket, and [flat, flat + numel) of another flat tensor.
struct Run {
  int64_t bucket = 0;
  int64_t flat = 0;
  int64_t numel = 0;
};

/// flat += bucket over all runs, on the host. A value of the bucket that is not finite counts as zero, and turns the
/// element of `not_finite`, one per run and of flat's dtype, into NaN.
void add_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs,
                const at::Tensor& not_finite);

/// On the host, flat -= bucket over all runs, where the bucket is finite: undoes `add_finite` up to rounding.
void subtract_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs);

/// flat = bucket over all runs. One launch on a device.
void gather(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs);

/// bucket = flat over all runs. One launch on a device.
void scatter(const at::Tensor& bucket, const at::Tensor& flat, std::span<const Run> runs);

/// Whether all values are finite. Waits for a device.
[[nodiscard]] bool all_finite(const at::Tensor& data);

}  // namespace lockstep
