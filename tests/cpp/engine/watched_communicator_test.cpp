// Waits, and calls that start collectives, under a monitor.
#include "comm/watched_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local_communicator.h"
#include "core/error.h"
#include "watched_ranks.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

class NeverEnding final : public Transfer {
 public:
  void wait() override { FAIL() << "nobody watches"; }
  bool wait_for(milliseconds patience) override {
    std::this_thread::sleep_for(patience);
    return false;
  }
};

class Broken final : public Transfer {
 public:
  void wait() override { throw std::runtime_error("Connection reset by peer"); }
};

template <typename Kind>
class Group final : public Communicator {
 public:
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 2; }
  [[nodiscard]] std::string name() const override { return "broken"; }
  TransferPtr sum(at::Tensor /*data*/) override { return std::make_unique<Kind>(); }
  TransferPtr max(at::Tensor /*data*/) override { return std::make_unique<Kind>(); }
  TransferPtr broadcast(at::Tensor /*data*/, int /*root*/) override { return std::make_unique<Kind>(); }
  TransferPtr all_gather(at::Tensor /*out*/, at::Tensor /*in*/) override { return std::make_unique<Kind>(); }
  TransferPtr all_to_all(at::Tensor /*out*/, at::Tensor /*in*/) override { return std::make_unique<Kind>(); }
  TransferPtr reduce_scatter(at::Tensor /*out*/, at::Tensor /*in*/) override { return std::make_unique<Kind>(); }
};

TEST(WatchedCommunicator, EndsAWaitThatHasBecomeHopeless) {
  Ranks ranks(2);
  const auto comm = watched(std::make_shared<Group<NeverEnding>>(), ranks.monitors[0]);
  ranks.progress[0]->enter(Stage::kBucketWait);
  ranks.monitors[1]->publish_failure("[rank 1] oops [LS-006]");
  EXPECT_THAT([&] { comm->sum(at::ones({1}))->wait(); }, ThrowsMessage<PeerError>(HasSubstr("rank 1 has failed")));
  EXPECT_THAT([&] { comm->outwait([](milliseconds) { return false; }); },
              ThrowsMessage<PeerError>(HasSubstr("rank 1 has failed")));
}

TEST(WatchedCommunicator, ExplainsACollectiveThatFails) {
  Ranks ranks(2);
  const auto comm = watched(std::make_shared<Group<Broken>>(), ranks.monitors[0]);
  ranks.monitors[1]->publish_failure("[rank 1] oops");
  EXPECT_THAT([&] { comm->sum(at::ones({1}))->wait(); },
              ThrowsMessage<PeerError>(AllOf(HasSubstr("Connection reset by peer"), HasSubstr("rank 1 has failed: "),
                                             HasSubstr("[LS-020]"))));
}

/// A group whose sums do what a test says at their start.
class Starting final : public Communicator {
 public:
  Starting(std::function<void()> at_start, std::function<bool()> at_abort)
      : at_start_(std::move(at_start)), at_abort_(std::move(at_abort)) {}
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 2; }
  [[nodiscard]] std::string name() const override { return "starting"; }
  TransferPtr sum(at::Tensor /*data*/) override { return started(); }
  TransferPtr max(at::Tensor /*data*/) override { return started(); }
  TransferPtr broadcast(at::Tensor /*data*/, int /*root*/) override { return started(); }
  TransferPtr all_gather(at::Tensor /*out*/, at::Tensor /*in*/) override { return started(); }
  TransferPtr all_to_all(at::Tensor /*out*/, at::Tensor /*in*/) override { return started(); }
  TransferPtr reduce_scatter(at::Tensor /*out*/, at::Tensor /*in*/) override { return started(); }
  bool abort(const std::string& /*report*/) override { return at_abort_(); }

 private:
  TransferPtr started() {
    at_start_();
    return std::make_unique<NeverEnding>();
  }

  std::function<void()> at_start_;
  std::function<bool()> at_abort_;
};

struct Started {
  explicit Started(std::function<void()> at_start)
      : comm(watched(std::make_shared<Starting>(std::move(at_start), [this] { return ++aborts > 0; }),
                     ranks.monitors[0])) {
    ranks.progress[0]->next_step();
    ranks.progress[0]->enter(Stage::kBackward);
  }
  void sum() { comm->sum(at::ones({1})); }

  Ranks ranks{2};
  std::atomic<int> aborts = 0;
  std::shared_ptr<Communicator> comm;
};

TEST(WatchedCommunicator, NamesTheRankThatBrokeACollectiveAtItsStart) {
  Started job([] { throw CollectiveError("[rank 0] NCCL failed: Connection closed [LS-011]"); });
  job.ranks.kill(1, Stage::kBackward);
  EXPECT_THAT([&] { job.sum(); },
              ThrowsMessage<PeerError>(AllOf(HasSubstr("NCCL failed: Connection closed [rank 0] is in backward"),
                                             HasSubstr("rank 1 has not been heard of"), HasSubstr("[LS-021]"),
                                             Not(HasSubstr("[LS-011]")))));
  EXPECT_THAT([&] { job.ranks.monitors[0]->raise_if_lost(); },
              ThrowsMessage<PeerError>(HasSubstr("rank 1 has not been heard of")));
}

TEST(WatchedCommunicator, KeepsTheCodeOfABrokenCollectiveThatNoRankExplains) {
  Started job([] { throw CollectiveError("[rank 0] NCCL failed: a cable [LS-011]"); });
  EXPECT_THAT([&] { job.sum(); }, ThrowsMessage<Error>(AllOf(HasSubstr("a cable [rank 0] is in backward of step 1"),
                                                             HasSubstr("rank 1 is wrapping its model"),
                                                             HasSubstr("[LS-011]"), Not(HasSubstr("[LS-022]")))));
  const auto line = job.ranks.monitors[1]->lines()[0];
  ASSERT_TRUE(line);
  EXPECT_EQ(line->stage, Stage::kFailed) << "the cause may be here";
}

TEST(WatchedCommunicator, KeepsTheTypeOfAnErrorOfC10dAndEndsItsGroupFirst) {
  Started job(
      [] { C10_THROW_ERROR(DistBackendError, "NCCL error: remote process exited or there was a network error"); });
  job.ranks.monitors[1]->publish_failure("[rank 1] oops");
  EXPECT_THAT([&] { job.sum(); }, ThrowsMessage<c10::DistBackendError>(
                                      AllOf(HasSubstr("remote process exited"),
                                            HasSubstr("rank 1 has failed: [rank 1] oops"), HasSubstr("[LS-020]"))));
  EXPECT_EQ(job.aborts, 1);
}

TEST(WatchedCommunicator, WhatARankDoesWrongAtAStartIsItsOwnAffair) {
  const auto begin = steady_clock::now();
  Started misuse([] { C10_THROW_ERROR(DistBackendError, "ncclInvalidUsage: Duplicate GPU detected"); });
  EXPECT_THAT([&] { misuse.sum(); }, ThrowsMessage<c10::DistBackendError>(Not(HasSubstr("rank 1"))));
  Started memory([] { C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory"); });
  EXPECT_THAT([&] { memory.sum(); }, ThrowsMessage<c10::OutOfMemoryError>(Not(HasSubstr("rank 1"))));
  EXPECT_EQ(misuse.aborts + memory.aborts, 0);
  EXPECT_LT(steady_clock::now() - begin, PeerWatch::kSilence) << "nobody is looked for";
}

TEST(WatchedCommunicator, ACallThatBlocksUntilTheGroupIsEndedSaysWhoseFaultItWas) {
  const std::vector<std::function<void()>> ends{
      [] { C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted on rank 0"); },
      [] { throw std::runtime_error("NCCL Error 3: internal error"); },
      [] { fail(Code::kReductionFailed, "aborted"); },
  };
  for (const auto& end : ends) {
    std::atomic<bool> aborted = false;
    Ranks ranks(2);
    const auto blocks = [&] {
      ASSERT_TRUE(eventually([&] { return aborted.load(); }));
      end();
    };
    const auto comm = watched(std::make_shared<Starting>(blocks, [&] { return aborted = true; }), ranks.monitors[0]);
    ranks.progress[0]->enter(Stage::kBackward);
    ranks.monitors[1]->publish_failure("[rank 1] oops");
    EXPECT_THAT([&] { comm->sum(at::ones({1})); }, ThrowsMessage<PeerError>(HasSubstr("rank 1 has failed: [rank 1]")));
  }
}

TEST(WatchedCommunicator, WithoutAMonitorIsTheInnerOne) {
  const auto inner = std::make_shared<LocalCommunicator>();
  EXPECT_EQ(watched(inner, nullptr), inner);
}

}  // namespace
}  // namespace lockstep
