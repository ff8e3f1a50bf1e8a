// The parts of the Python module, one function a file.
#pragma once

#include <torch/extension.h>

#include <memory>

namespace lockstep {
class Replica;
}

namespace lockstep::python {

/// For classes that may be the last owner of a process group. Its threads drop Python objects while they hold a mutex
/// that its destructor wants (gloo in torch 2.15): who destroys it with the GIL in hand may wait for ever.
inline constexpr py::release_gil_before_calling_cpp_dtor kDestroyedWithoutGil;

void bind_communicator(py::module_& m);
void bind_reducer(py::module_& m);
void bind_logger(py::module_& m);
/// Adds to the class that `bind_reducer` made.
void bind_watch(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);
void bind_times(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);
void bind_hooks(py::module_& m, py::class_<Replica, std::shared_ptr<Replica>>& reducer);

}  // namespace lockstep::python
