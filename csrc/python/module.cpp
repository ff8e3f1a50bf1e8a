// lockstep._C: the engine for Python. No logic here: names, arguments, and dropping the GIL.
#include <torch/version.h>

#include "comm/nccl_communicator.h"
#include "core/bucket_planner.h"
#include "python/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The C++ engine of lockstep. Private: use the classes of the package.";
  m.attr("torch_version") = TORCH_VERSION;
  m.def("chosen_limits", &lockstep::chosen_limits, py::arg("total_bytes"),
        "Bucket limits in bytes for a model on a device, where the user gave none.");
  m.def("nccl_version", &lockstep::nccl_version, "Version of NCCL in this build, '' without.");
  lockstep::python::bind_communicator(m);
  lockstep::python::bind_reducer(m);
  lockstep::python::bind_logger(m);
}
