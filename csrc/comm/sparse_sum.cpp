#include "comm/sparse_sum.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace lockstep {
namespace {

at::Tensor gathered(Communicator& comm, const at::Tensor& mine) {
  at::Tensor all = at::empty({comm.size() * mine.numel()}, mine.options());
  comm.all_gather(all, mine.reshape({-1}))->wait();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape.insert(shape.begin(), comm.size());
  return all.view(shape);
}

/// The first dimension grows to `rows`; what is new is zeros.
at::Tensor padded(const at::Tensor& tensor, int64_t rows) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  const int64_t present = shape[0];
  shape[0] = rows;
  at::Tensor result = at::zeros(shape, tensor.options());
  result.narrow(0, 0, present).copy_(tensor);
  return result;
}

/// What `sum_sparse` has done before it returned.
class Done final : public Transfer {
 public:
  void wait() override {}
};

}  // namespace

TransferPtr sum_sparse(Communicator& comm, at::Tensor data) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = data.coalesce();
  const at::Tensor indices = mine.indices().t();
  const at::Tensor values = mine.values();
  const at::Tensor counts = gathered(comm, at::full({1}, indices.size(0), indices.options())).to(at::kCPU);
  const auto* count = counts.const_data_ptr<int64_t>();
  const int64_t most = *std::max_element(count, count + comm.size());

  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  if (most > 0) {
    const at::Tensor indices_of = gathered(comm, padded(indices, most));
    const at::Tensor reals = values.is_complex() ? at::view_as_real(values) : values;
    at::Tensor values_of = gathered(comm, padded(reals, most));
    if (values.is_complex()) values_of = at::view_as_complex(values_of);
    for (int rank = 0; rank < comm.size(); ++rank) {
      all_indices.push_back(indices_of[rank].narrow(0, 0, count[rank]));
      all_values.push_back(values_of[rank].narrow(0, 0, count[rank]));
    }
  }
  const at::Tensor sum =
      most == 0 ? mine
                : at::sparse_coo_tensor(at::cat(all_indices).t(), at::cat(all_values), data.sizes(), data.options())
                      .coalesce();
  data.copy_(sum);
  return std::make_unique<Done>();
}

}  // namespace lockstep
