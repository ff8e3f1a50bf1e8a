// Sums of sparse tensors over backends that only know dense ones.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace lockstep {

/// `data` (sparse COO) becomes its sum over ranks, by gathering indices and values. The host waits before this returns,
/// because the number of entries differs from rank to rank. Collective.
///
/// Traffic: every rank receives, from each rank, as many entries as the fullest one has.
TransferPtr sum_sparse(Communicator& comm, at::Tensor data);

}  // namespace lockstep
