// lockstep._C: the engine for Python. No logic here: names, arguments, and dropping the GIL.
#include <torch/version.h>

#include "comm/nccl_communicator.h"
#include "core/error.h"
#include "python/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The C++ engine of lockstep. Private: use the classes of the package.";
  m.attr("torch_version") = TORCH_VERSION;
  m.def("nccl_version", &lockstep::nccl_version, "Version of NCCL in this build, '' without.");
  lockstep::python::bind_communicator(m);
  lockstep::python::bind_reducer(m);
  lockstep::python::bind_logger(m);
}
