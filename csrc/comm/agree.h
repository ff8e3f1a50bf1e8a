// Questions that all ranks must answer alike before anything is reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace lockstep {

/// Checks that every rank wraps the same model: count, names, shapes, strides, dtypes and device types of the
/// parameters, in the same order. One small all-gather when they agree; a second one only to find the difference.
///
/// Collective: every rank must call it. When ranks differ, **every** rank raises the same text, which names both
/// ranks, the first parameter that differs, and both sides' view of it.
///
/// @param params  as registered on this rank.
/// @param names   one per parameter.
/// @throws lockstep::Error  the ranks differ.
void verify_same_model(Communicator& comm, const std::vector<at::Tensor>& params,
                       const std::vector<std::string>& names);

/// Checks that `tensors` hold the same bits, shapes and dtypes on every rank: one 64-bit checksum of them all, and one
/// for each tensor only where that one differs. A checksum depends on value and place of every element; two different
/// tensors have equal ones with a chance of about 2^-64. On a device the host waits for it.
///
/// Collective. When ranks differ, **every** rank raises the same text: the first tensors that differ from rank 0's, and
/// on which ranks.
///
/// @param names  one per tensor.
/// @throws lockstep::Error  the ranks differ.
void verify_same_values(Communicator& comm, const std::vector<at::Tensor>& tensors,
                        const std::vector<std::string>& names);

/// Replaces `values` (int32 on the host) by those of rank 0. Collective.
/// @param device  where the exchange happens: CPU for gloo, the model's device for NCCL.
void adopt_from_rank_zero(Communicator& comm, std::vector<int32_t>& values, at::Device device);

}  // namespace lockstep
