// Runs comm hooks that were written in Python for torch: hook(state, bucket: dist.GradBucket) -> Future[Tensor].
#pragma once

#include <torch/extension.h>

#include <memory>
#include <string>
#include <vector>

#include "hooks/comm_hook.h"
#include "python/callback_order.h"

namespace lockstep::python {

/// Wraps a Python hook. The hook sees torch's own `GradBucket` with undivided gradients and no gaps between them.
/// Takes the GIL while the hook runs; an exception of the hook reaches `backward()` with its type.
///
/// @param groups  which the hook may use, as far as they count their collectives; see CallbackOrder.
std::unique_ptr<CommHook> make_python_hook(py::object state, py::object hook, std::string name,
                                           std::vector<CallbackOrder::Group> groups);

}  // namespace lockstep::python
