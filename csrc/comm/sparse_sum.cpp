#include "comm/sparse_sum.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "comm/host_copy.h"

namespace lockstep {
namespace {

/// What all ranks hold of one tensor, on its way: rank r's at [r].
class Gathered {
 public:
  Gathered(Communicator& comm, const at::Tensor& mine)
      : mine_(mine.reshape({-1})),
        flat_(at::empty({comm.size() * mine.numel()}, mine.options())),
        shape_(mine.sizes().vec()),
        transfer_(comm.all_gather(flat_, mine_)) {
    shape_.insert(shape_.begin(), comm.size());
  }

  bool wait_for(std::chrono::milliseconds patience) {
    if (transfer_ && transfer_->wait_for(patience)) transfer_ = nullptr;
    return !transfer_;
  }
  [[nodiscard]] at::Tensor all() const { return flat_.view(shape_); }

 private:
  at::Tensor mine_;  // must live until the transfer has ended
  at::Tensor flat_;
  std::vector<int64_t> shape_;
  TransferPtr transfer_;
};

/// The first dimension grows to `rows`; what is new is zeros.
at::Tensor padded(const at::Tensor& tensor, int64_t rows) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  const int64_t present = shape[0];
  shape[0] = rows;
  at::Tensor result = at::zeros(shape, tensor.options());
  result.narrow(0, 0, present).copy_(tensor);
  return result;
}

at::Tensor as_real(const at::Tensor& values) { return values.is_complex() ? at::view_as_real(values) : values; }

class SparseSum final : public Transfer {
 public:
  SparseSum(Communicator& comm, at::Tensor data)
      : comm_(comm),
        data_(std::move(data)),
        mine_(data_.coalesce()),
        indices_(mine_.indices().t()),
        counts_(comm, at::full({1}, indices_.size(0), indices_.options())) {}

  void wait() override {
    comm_.outwait([this](std::chrono::milliseconds patience) { return wait_for(patience); });
  }

  /// Each of its steps gets the whole patience, and is not repeated by a later call.
  bool wait_for(std::chrono::milliseconds patience) override {
    const at::NoGradGuard no_grad;
    if (!all_indices_) {
      if (!counts_.wait_for(patience)) return false;
      if (!counts_on_host_) counts_on_host_.emplace(counts_.all());
      if (!counts_on_host_->wait_for(patience)) return false;
      if (!send_entries(counts_on_host_->await(comm_))) return true;
    }
    if (!all_indices_->wait_for(patience) || !all_values_->wait_for(patience)) return false;
    add_up();
    return true;
  }

 private:
  /// Returns false where no rank has any.
  bool send_entries(const at::Tensor& counts) {
    const auto* count = counts.const_data_ptr<int64_t>();
    count_.assign(count, count + comm_.size());
    const int64_t most = *std::max_element(count_.begin(), count_.end());
    if (most == 0) return false;
    all_indices_.emplace(comm_, padded(indices_, most));
    all_values_.emplace(comm_, padded(as_real(mine_.values()), most));
    return true;
  }

  void add_up() {
    at::Tensor values = all_values_->all();
    if (data_.is_complex()) values = at::view_as_complex(values);
    std::vector<at::Tensor> parts_of_indices;
    std::vector<at::Tensor> parts_of_values;
    for (int rank = 0; rank < comm_.size(); ++rank) {
      parts_of_indices.push_back(all_indices_->all()[rank].narrow(0, 0, count_[rank]));
      parts_of_values.push_back(values[rank].narrow(0, 0, count_[rank]));
    }
    data_.copy_(
        at::sparse_coo_tensor(at::cat(parts_of_indices).t(), at::cat(parts_of_values), data_.sizes(), data_.options())
            .coalesce());
  }

  Communicator& comm_;
  at::Tensor data_;
  at::Tensor mine_;
  at::Tensor indices_;  // [entries, sparse dimensions]
  Gathered counts_;
  std::optional<HostCopy> counts_on_host_;
  std::vector<int64_t> count_;
  std::optional<Gathered> all_indices_;
  std::optional<Gathered> all_values_;
};

}  // namespace

TransferPtr sum_sparse(Communicator& comm, at::Tensor data) {
  const at::NoGradGuard no_grad;
  return std::make_unique<SparseSum>(comm, std::move(data));
}

}  // namespace lockstep
