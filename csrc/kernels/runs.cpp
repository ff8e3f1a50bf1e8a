#include "kernels/runs.h"

#include <ATen/ATen.h>

#include <cmath>

namespace lockstep {
namespace {

at::Tensor in_bucket(const at::Tensor& bucket, const Run& run) { return bucket.narrow(0, run.bucket, run.numel); }
at::Tensor in_flat(const at::Tensor& flat, const Run& run) { return flat.narrow(0, run.flat, run.numel); }

/// `data`, with zeros in place of what is not finite.
at::Tensor finite_part(const at::Tensor& data) { return at::where(at::isfinite(data), data, 0); }

}  // namespace

void add_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs,
                const at::Tensor& not_finite) {
  for (const Run& run : runs) {
    const at::Tensor data = in_bucket(bucket, run);
    // The sum is finite unless something is not (or it overflows, which is as bad), and zero times it zero or NaN.
    const at::Tensor verdict = data.sum(flat.scalar_type()).mul_(0);
    not_finite.add_(verdict);
    if (data.is_cpu() && !std::isnan(verdict.item<double>())) {
      in_flat(flat, run).add_(data);
    } else {
      in_flat(flat, run).add_(finite_part(data));
    }
  }
}

void subtract_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs) {
  for (const Run& run : runs) in_flat(flat, run).sub_(finite_part(in_bucket(bucket, run)));
}

void gather(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs) {
  for (const Run& run : runs) in_flat(flat, run).copy_(in_bucket(bucket, run));
}

void scatter(const at::Tensor& bucket, const at::Tensor& flat, std::span<const Run> runs) {
  for (const Run& run : runs) in_bucket(bucket, run).copy_(in_flat(flat, run));
}

bool all_finite(const at::Tensor& data) { return at::isfinite(data).all().item<bool>(); }

}  // namespace lockstep
