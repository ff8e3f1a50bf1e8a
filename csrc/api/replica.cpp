#include "api/replica.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>

#include "comm/agree.h"
#include "hooks/registry.h"

namespace lockstep {
namespace {

/// Tensors that can travel as one flat tensor.
struct Chunk {
  std::vector<at::Tensor> tensors;
  int64_t bytes = 0;
};

std::vector<Chunk> chunks_of(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes) {
  std::vector<Chunk> chunks;
  std::map<std::pair<at::ScalarType, std::string>, size_t> open;  // ordered: the same on every rank
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const std::pair kind{tensor.scalar_type(), tensor.device().str()};
    auto place = open.find(kind);
    if (place == open.end() || chunks[place->second].bytes >= chunk_bytes) {
      place = open.insert_or_assign(kind, chunks.size()).first;
      chunks.emplace_back();
    }
    chunks[place->second].tensors.push_back(tensor);
    chunks[place->second].bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return chunks;
}

/// Says that this replica waits for the others, and afterwards that it does what it did before.
class Waiting {
 public:
  explicit Waiting(Progress& progress) : progress_(progress), before_(progress.stage()) {
    progress_.enter(Stage::kBufferWait);
  }
  ~Waiting() {
    if (progress_.stage() == Stage::kBufferWait) progress_.enter(before_);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Progress& progress_;
  Stage before_;
};

at::Tensor as_reals(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

at::Tensor flatten(const Chunk& chunk) {
  std::vector<at::Tensor> parts;
  parts.reserve(chunk.tensors.size());
  for (const at::Tensor& tensor : chunk.tensors) {
    const at::Tensor dense = as_reals(tensor.contiguous());
    parts.push_back(dense.dim() == 1 ? dense : dense.view({-1}));
  }
  return at::cat(parts);
}

/// The way back, a few launches for all tensors.
void unflatten(const Chunk& chunk, const at::Tensor& flat) {
  std::vector<at::Tensor> targets;
  std::vector<int64_t> sizes;
  for (const at::Tensor& tensor : chunk.tensors) {
    targets.push_back(as_reals(tensor));
    sizes.push_back(targets.back().numel());
  }
  std::vector<at::Tensor> parts = flat.split_with_sizes(sizes);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (targets[i].dim() != 1) parts[i] = parts[i].view(targets[i].sizes());
  }
  at::_foreach_copy_(targets, parts);
}

}  // namespace

Replica::Replica(ParamList params, std::shared_ptr<Communicator> comm, ReducerOptions options,
                 std::shared_ptr<Progress> progress)
    : progress_(std::move(progress)),
      comm_(std::move(comm)),
      reducer_(Reducer::create(std::move(params), comm_, std::move(options), make_comm_hook("allreduce"), progress_)) {}

void Replica::reset(std::shared_ptr<Communicator> comm) {
  comm_ = std::move(comm);
  reducer_->reset(comm_);
}

void Replica::verify_same_model() {
  const Waiting waiting(*progress_);
  lockstep::verify_same_model(*comm_, reducer_->params().tensors, reducer_->params().names);
}

void Replica::isolate() {
  const Waiting waiting(*progress_);
  comm_->isolate();
  reducer_->on_new_connections();
}

void Replica::assert_in_sync(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names) {
  const Waiting waiting(*progress_);
  verify_same_values(*comm_, tensors, names);
}

void Replica::copy_from(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes, int root) {
  const Waiting waiting(*progress_);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView no_versions;
  for (const Chunk& chunk : chunks_of(tensors, chunk_bytes)) {
    const at::Tensor flat = flatten(chunk);
    comm_->broadcast(flat, root)->wait();
    if (comm_->rank() != root) unflatten(chunk, flat);
  }
}

}  // namespace lockstep
