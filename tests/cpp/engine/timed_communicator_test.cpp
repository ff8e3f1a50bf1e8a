// What is noted of collectives that pass through.
#include "comm/timed_communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/known_end.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using testing::run_ranks;
using testing::ThreadCommunicator;

TEST(TimedCommunicator, NotesKindAndBytesAsNcclTestsCountsThem) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> inner) {
    TimedCommunicator comm(inner, at::kCPU, std::nullopt);
    at::Tensor data = at::full({6}, 1.0 + inner->rank(), at::kFloat);
    comm.sum(data)->wait();
    EXPECT_TRUE(at::equal(data, at::full({6}, 3.0, at::kFloat))) << "the call was passed on";
    comm.broadcast(at::ones({4}, at::kByte), 0)->wait();
    comm.all_gather(at::empty({8}, at::kFloat), at::ones({4}, at::kFloat))->wait();
    comm.reduce_scatter(at::empty({4}, at::kFloat), at::ones({8}, at::kFloat))->wait();

    std::vector<std::pair<std::string, int64_t>> noted;
    for (const CollectiveRecordPtr& record : comm.records()) noted.emplace_back(record->kind, record->bytes);
    EXPECT_THAT(noted, ElementsAre(Pair("all_reduce", 24), Pair("broadcast", 4), Pair("all_gather", 32),
                                   Pair("reduce_scatter", 32)));
  });
}

TEST(TimedCommunicator, EndsWithTheWaitWhereTheBackendDoesNotSay) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> inner) {
    TimedCommunicator comm(inner, at::kCPU, std::nullopt);
    const TransferPtr transfer = comm.sum(at::ones({3}));
    const CollectiveRecordPtr record = comm.records().front();
    EXPECT_EQ(record->ended.load(), 0);
    transfer->wait();
    EXPECT_FALSE(record->exact);
    EXPECT_GE(record->ended.load(), record->issued.host);
  });
}

/// Ends when it is told to.
class TellingTransfer final : public Transfer, public KnownEnd {
 public:
  explicit TellingTransfer(std::function<void()>& end) : end_(&end) {}
  void wait() override {}
  bool tell_end(const std::function<void()>& tell) override {
    *end_ = tell;
    return true;
  }
  bool lead(const c10::Stream& /*stream*/) override { return false; }

 private:
  std::function<void()>* end_;
};

class TellingCommunicator final : public ThreadCommunicator {
 public:
  TellingCommunicator(std::shared_ptr<testing::ThreadWorld> world, std::function<void()>& end)
      : ThreadCommunicator(std::move(world), 0), end_(&end) {}
  TransferPtr sum(at::Tensor /*data*/) override { return std::make_unique<TellingTransfer>(*end_); }

 private:
  std::function<void()>* end_;
};

TEST(TimedCommunicator, EndsWhenTheBackendSaysSoAndNotWithTheWait) {
  std::function<void()> end;
  const auto inner = std::make_shared<TellingCommunicator>(std::make_shared<testing::ThreadWorld>(1), end);
  TimedCommunicator comm(inner, at::kCPU, std::nullopt);
  comm.sum(at::ones({3}))->wait();
  const CollectiveRecordPtr record = comm.records().front();
  EXPECT_TRUE(record->exact);
  EXPECT_EQ(record->ended.load(), 0) << "waiting is not the end";
  end();
  EXPECT_GE(record->ended.load(), record->issued.host);
}

}  // namespace
}  // namespace lockstep
