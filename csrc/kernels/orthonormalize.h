// Makes the columns of many tall, narrow matrices orthonormal.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The columns of every matrix become orthonormal, in place.
///
/// Up to two columns by the Gram-Schmidt process, more by Householder QR: torch's choice, so that the signs of columns
/// are torch's too. A column of zeros (a gradient that vanishes) stays zeros where torch's hook divides zero by zero.
///
/// @param matrices  [count, rows, columns], contiguous, kFloat or kDouble, rows >= columns.
/// @param epsilon   added to the norm of each column; with up to two columns only, as in torch.
void orthonormalize(const at::Tensor& matrices, double epsilon);

}  // namespace lockstep
