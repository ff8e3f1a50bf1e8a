// Sums of sparse tensors over backends that know none, or whose own is not safe.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace lockstep {

/// `data` (sparse COO) becomes its sum over ranks, by gathering indices and values. Collective.
///
/// In two rounds, because the number of entries differs from rank to rank: what is issued here gathers the numbers; the
/// entries leave when the transfer is waited for, whose end the host then waits for on a device, too.
/// Traffic: every rank receives, from each rank, as many entries as the fullest one has.
TransferPtr sum_sparse(Communicator& comm, at::Tensor data);

}  // namespace lockstep
