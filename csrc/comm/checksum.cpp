#include "comm/checksum.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // numbers looked at together
constexpr int64_t kSpread = 0x1B873593CC9E2D51;
constexpr int64_t kMix = 0x2545F4914F6CDD1D;

/// The bits of `flat` (1-D, contiguous) as int64 numbers, of at most 32 bits each: in a product modulo 2^64 the highest
/// bits of wider ones would count alike at every place, so that two changes of sign would cancel.
at::Tensor bits_of(const at::Tensor& flat) {
  at::Tensor reals = flat.is_complex() ? at::view_as_real(flat).reshape({-1}) : flat;
  switch (reals.element_size()) {
    case 1:
      return reals.view(at::kByte).to(at::kLong);
    case 2:
      return reals.view(at::kShort).to(at::kLong);
    default:
      return reals.view(at::kInt).to(at::kLong);
  }
}

/// Odd numbers, so that a single bit changes the sum, and without a pattern, so that changes at several places do not
/// balance: 1 0 0 1 and 0 1 1 0 have equal sums under any weights that grow evenly.
at::Tensor weights(int64_t count, const at::TensorOptions& options) {
  at::Tensor spread = at::arange(1, count + 1, options).mul_(kSpread);
  spread.bitwise_xor_(spread.bitwise_right_shift(31));
  return spread.mul_(kMix).bitwise_or_(1);
}

}  // namespace

int64_t checksum(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  int64_t sum = combined(static_cast<int64_t>(tensor.scalar_type()), tensor.dim());
  for (const int64_t size : tensor.sizes()) sum = combined(sum, size);
  at::Tensor dense = tensor.detach();
  if (dense.layout() != at::kStrided) dense = dense.to_dense();
  const at::Tensor flat = dense.resolve_conj().resolve_neg().contiguous().view({-1});
  const int64_t piece = kPiece / std::max<int64_t>(1, flat.element_size() / 4);
  for (int64_t start = 0; start < flat.numel(); start += piece) {
    at::Tensor bits = bits_of(flat.narrow(0, start, std::min(piece, flat.numel() - start)));
    sum = combined(sum, bits.mul(weights(bits.numel(), bits.options())).sum().item<int64_t>());
  }
  return sum;
}

}  // namespace lockstep
