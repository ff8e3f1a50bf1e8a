// A communicator of our own on NCCL, without a c10d group in between.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"

namespace lockstep {

/// The NCCL version this library was built with, as "2.28.9"; empty without NCCL.
[[nodiscard]] std::string nccl_version();

/// Creates a communicator over all ranks of `store`. Collective.
/// @throws lockstep::Error  in a build without NCCL.
[[nodiscard]] std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                                                   int rank, int size);

}  // namespace lockstep
