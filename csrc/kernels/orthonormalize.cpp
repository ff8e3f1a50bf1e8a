#include "kernels/orthonormalize.h"

#include <ATen/ATen.h>

namespace lockstep {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const int64_t columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    const at::Tensor norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, true).add_(epsilon);
    column.copy_(at::where(norm.eq(0), 0, column.div(norm)));
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(column.mul(rest).sum(1, true).mul(column));
  }
}

}  // namespace

void orthonormalize(const at::Tensor& matrices, double epsilon) {
  if (matrices.numel() == 0) return;
  if (matrices.size(2) <= 2) return gram_schmidt(matrices, epsilon);
  matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
}

}  // namespace lockstep
