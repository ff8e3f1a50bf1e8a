// The NCCL half of the communicators in a build without NCCL: the same symbols, and one clear sentence.
#include "comm/backends.h"
#include "comm/nccl_communicator.h"
#include "core/error.h"

namespace lockstep {

std::string nccl_version() { return {}; }

std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::Store>& /*store*/, int rank,
                                                     int /*size*/, const NcclOptions& /*options*/) {
  fail(Code::kNoNccl,
       "[rank {}] this build of lockstep has no NCCL. Rebuild with CUDA, or use the process group as it is.", rank);
}

int num_gpus() { return 0; }

at::Device use_gpu(int /*index*/) {
  fail(Code::kNoNccl, "this build of lockstep has no NCCL and uses no GPU. Rebuild with CUDA, or choose gloo.");
}

void look_on_during_captures() {}

BackendPtr make_nccl_backend(const StorePtr& /*store*/, int rank, int /*size*/, std::chrono::milliseconds /*timeout*/) {
  fail(Code::kNoNccl, "[rank {}] this build of lockstep has no NCCL. Rebuild with CUDA, or choose the backend 'gloo'.",
       rank);
}

}  // namespace lockstep
