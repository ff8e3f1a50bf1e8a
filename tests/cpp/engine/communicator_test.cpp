// The communicators' contract, and what ranks agree on before they reduce.
#include "comm/communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/agree.h"
#include "comm/local_communicator.h"
#include "comm/nccl_communicator.h"
#include "core/error.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::ThreadCommunicator;

at::Tensor row(std::initializer_list<double> values) { return at::tensor(at::ArrayRef<double>(values)); }

TEST(LocalCommunicator, EveryCollectiveIsTheIdentity) {
  LocalCommunicator comm;
  at::Tensor data = row({1, 2});
  comm.sum(data)->wait();
  comm.sum_all(std::vector{data, data})->wait();
  comm.max(data)->wait();
  comm.average(data)->wait();
  comm.broadcast(data, 0)->wait();
  EXPECT_TRUE(data.equal(row({1, 2})));
  for (const auto call : {&Communicator::all_gather, &Communicator::all_to_all, &Communicator::reduce_scatter}) {
    at::Tensor output = at::zeros({2}, at::kDouble);
    (comm.*call)(output, data)->wait();
    EXPECT_TRUE(output.equal(data));
  }
}

// The thread world stands in for real groups in the tests of the reducer: it must keep the same contract.
TEST(ThreadCommunicator, KeepsTheContractOfTheInterface) {
  run_ranks(3, [](std::shared_ptr<ThreadCommunicator> comm) {
    const double mine = comm->rank() + 1;
    at::Tensor data = row({mine, 10 * mine, 0});
    comm->sum(data)->wait();
    EXPECT_TRUE(data.equal(row({6, 60, 0})));
    comm->average(data)->wait();
    EXPECT_TRUE(data.allclose(row({6, 60, 0})));
    const std::vector<at::Tensor> several{row({mine}), row({10 * mine, 0})};
    comm->sum_all(several)->wait();
    EXPECT_TRUE(several[0].equal(row({6})) && several[1].equal(row({60, 0})));
    data = row({mine, -mine});
    comm->max(data)->wait();
    EXPECT_TRUE(data.equal(row({3, -1})));
    data = row({mine});
    comm->broadcast(data, 1)->wait();
    EXPECT_TRUE(data.equal(row({2})));
    at::Tensor output = at::zeros({3}, at::kDouble);
    comm->all_gather(output, row({mine}))->wait();
    EXPECT_TRUE(output.equal(row({1, 2, 3})));
    comm->all_to_all(output, row({mine, 10 * mine, 100 * mine}))->wait();
    const double place = std::pow(10, comm->rank());
    EXPECT_TRUE(output.equal(row({place, 2 * place, 3 * place})));
    at::Tensor part = at::zeros({1}, at::kDouble);
    comm->reduce_scatter(part, row({mine, 10 * mine, 100 * mine}))->wait();
    EXPECT_TRUE(part.equal(row({6 * place})));
  });
}

TEST(VerifySameModel, CostsOneCollectiveWhenAllIsWell) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    verify_same_model(*comm, {at::zeros({2, 3}), at::zeros({4})}, {"a", "b"});
    EXPECT_EQ(comm->num_calls(), 1);
  });
}

TEST(VerifySameModel, RaisesTheSameDifferenceOnEveryRank) {
  run_ranks(3, [](std::shared_ptr<ThreadCommunicator> comm) {
    const int64_t last = comm->rank() == 2 ? 5 : 4;
    try {
      verify_same_model(*comm, {at::zeros({2, 3}), at::zeros({last})}, {"a", "b"});
      ADD_FAILURE() << "rank " << comm->rank() << " saw nothing";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("parameter 1 on rank 2"), HasSubstr("rank 0 has 'b' size [4]"),
                                      HasSubstr("rank 2 has 'b' size [5]")));
    }
  });
}

TEST(AdoptFromRankZero, GivesEveryRankTheValuesOfRankZero) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    std::vector<int32_t> values{comm->rank() * 10 + 1, comm->rank() * 10 + 2};
    adopt_from_rank_zero(*comm, values, at::kCPU);
    EXPECT_EQ(values, (std::vector<int32_t>{1, 2}));
  });
}

TEST(NcclCommunicator, ABuildWithoutItSaysSoInOneSentence) {
  if (!nccl_version().empty()) return;  // a build with NCCL is tested where GPUs are
  try {
    (void)make_nccl_communicator(nullptr, 1, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("[rank 1]"), HasSubstr("no NCCL")));
  }
}

}  // namespace
}  // namespace lockstep
