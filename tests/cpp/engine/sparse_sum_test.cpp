// Sums of sparse tensors by gathering: results by hand, and what is issued when.
#include "comm/sparse_sum.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "thread_world.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::ThreadCommunicator;

using CommPtr = std::shared_ptr<ThreadCommunicator>;

/// A table of 4 rows and 2 columns, of which row rows[i] is filled with values[i].
at::Tensor table(const std::vector<int64_t>& rows, const std::vector<double>& values) {
  const auto entries = static_cast<int64_t>(rows.size());
  const at::Tensor filled = at::tensor(values, at::kDouble).view({entries, 1}).expand({entries, 2});
  return at::sparse_coo_tensor(at::tensor(rows, at::kLong).view({1, entries}), filled, {4, 2}, at::TensorOptions());
}

std::vector<double> first_column(const at::Tensor& sparse) {
  const at::Tensor column = sparse.to_dense().select(1, 0).contiguous();
  return {column.const_data_ptr<double>(), column.const_data_ptr<double>() + column.numel()};
}

TEST(SumSparse, AddsUpWhatRanksHoldOfEveryRow) {
  run_ranks(3, [](const CommPtr& comm) {
    const at::Tensor mine[] = {table({1, 1, 3}, {1, 10, 100}), table({}, {}), table({3, 0}, {1000, 7})};
    const at::Tensor data = mine[comm->rank()].clone();
    sum_sparse(*comm, data)->wait();
    EXPECT_EQ(first_column(data), (std::vector<double>{7, 11, 0, 1100}));
    EXPECT_TRUE(data.is_coalesced());
  });
}

TEST(SumSparse, OfNothingIsNothingAndSendsNoEntries) {
  run_ranks(2, [](const CommPtr& comm) {
    const at::Tensor data = table({}, {});
    sum_sparse(*comm, data)->wait();
    EXPECT_EQ(data._nnz(), 0);
    EXPECT_EQ(comm->num_calls(), 1);
  });
}

TEST(SumSparse, OfComplexNumbersKeepsBothParts) {
  run_ranks(2, [](const CommPtr& comm) {
    const c10::complex<double> mine(1, 10 * comm->rank());
    const at::Tensor values = at::full({1, 2}, mine, at::kComplexDouble);
    const at::Tensor data = at::sparse_coo_tensor(at::full({1, 1}, 2, at::kLong), values, {4, 2}, at::TensorOptions());
    sum_sparse(*comm, data)->wait();
    EXPECT_EQ(data.to_dense()[2][1].item<c10::complex<double>>(), c10::complex<double>(2, 10));
  });
}

// A rank that reaches its table early must not wait in the middle of its backward: others may need it before theirs.
TEST(SumSparse, WaitsForNobodyBeforeItIsAwaited) {
  run_ranks(2, [](const CommPtr& comm) {
    const at::Tensor first = table({comm->rank()}, {1});
    const at::Tensor second = table({2}, {1.0 + comm->rank()});
    at::Tensor between = at::ones({1});
    const TransferPtr a = sum_sparse(*comm, first);
    const TransferPtr b = sum_sparse(*comm, second);
    comm->sum(between)->wait();
    EXPECT_EQ(comm->num_calls(), 3) << "numbers of entries, twice, and the sum between";
    a->wait();
    b->wait();
    EXPECT_EQ(first_column(first), (std::vector<double>{1, 1, 0, 0}));
    EXPECT_EQ(first_column(second), (std::vector<double>{0, 0, 3, 0}));
    EXPECT_EQ(between.item<float>(), 2);
  });
}

}  // namespace
}  // namespace lockstep
