#include "kernels/runs.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "kernels/cast.h"
#include "kernels/pack.h"

namespace lockstep {
namespace {

at::Tensor in_bucket(const at::Tensor& bucket, const Run& run) { return bucket.narrow(0, run.bucket, run.numel); }
at::Tensor in_flat(const at::Tensor& flat, const Run& run) { return flat.narrow(0, run.flat, run.numel); }

/// The runs as the kernels that pack see them: the bucket is where the gradients are, the flat tensor is packed.
std::vector<Segment> segments_of(const at::Tensor& bucket, std::span<const Run> runs) {
  auto* base = static_cast<char*>(bucket.mutable_data_ptr());
  std::vector<Segment> segments;
  segments.reserve(runs.size());
  for (const Run& run : runs) {
    segments.push_back({base + run.bucket * static_cast<int64_t>(bucket.element_size()), run.flat, run.numel});
  }
  return segments;
}

/// `data`, with zeros in place of what is not finite.
at::Tensor finite_part(const at::Tensor& data) { return at::where(at::isfinite(data), data, 0); }

}  // namespace

void add_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs,
                const at::Tensor& not_finite) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const at::Tensor data = in_bucket(bucket, run);
    // The sum is finite unless something is not (or it overflows, which is as bad), and zero times it zero or NaN.
    const at::Tensor verdict = data.sum(flat.scalar_type()).mul_(0);
    not_finite[static_cast<int64_t>(i)].add_(verdict);
    in_flat(flat, run).add_(std::isnan(verdict.item<double>()) ? finite_part(data) : data);
  }
}

void subtract_finite(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs) {
  for (const Run& run : runs) in_flat(flat, run).sub_(finite_part(in_bucket(bucket, run)));
}

void gather(const at::Tensor& flat, const at::Tensor& bucket, std::span<const Run> runs) {
  if (runs.empty()) return;
  const std::vector<Segment> segments = segments_of(bucket, runs);
  if (flat.scalar_type() == bucket.scalar_type()) return pack(flat, segments, 1.0);
  pack_cast(flat, segments, bucket.scalar_type(), 1.0);
}

void scatter(const at::Tensor& bucket, const at::Tensor& flat, std::span<const Run> runs) {
  if (runs.empty()) return;
  const std::vector<Segment> segments = segments_of(bucket, runs);
  if (flat.scalar_type() == bucket.scalar_type()) return unpack(flat, segments);
  unpack_cast(flat, segments, bucket.scalar_type());
}

bool all_finite(const at::Tensor& data) { return at::isfinite(data).all().item<bool>(); }

}  // namespace lockstep
