// Ranks that watch each other through a store, each with a monitor of its own in one process.
#include "comm/monitor.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/local_communicator.h"
#include "comm/watched_communicator.h"
#include "core/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr milliseconds kThreshold{400};
constexpr std::chrono::seconds kPatience{20};
constexpr milliseconds kStep{20};

/// A store that can be cut off, as if the process that hosts it had died.
class FragileStore final : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    check_alive();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    check_alive();
    std::this_thread::sleep_for(delay_.load());
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    check_alive();
    return HashStore::check(keys);
  }
  void cut() { alive_ = false; }
  void slow_down(milliseconds delay) { delay_ = delay; }

 private:
  void check_alive() const {
    if (!alive_) throw std::runtime_error("Broken pipe");
  }
  std::atomic<bool> alive_ = true;
  std::atomic<milliseconds> delay_{};
};

bool eventually(const std::function<bool()>& condition) {
  const auto deadline = steady_clock::now() + kPatience;
  while (!condition()) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kStep);
  }
  return true;
}

struct Ranks {
  explicit Ranks(int size, milliseconds threshold = kThreshold) : store(c10::make_intrusive<FragileStore>()) {
    for (int rank = 0; rank < size; ++rank) {
      progress.push_back(std::make_shared<Progress>());
      monitors.push_back(std::make_shared<Monitor>(store, rank, size, progress.back(), threshold));
    }
  }

  /// That rank has written `stage` once, and dies.
  void kill(size_t rank, Stage stage) {
    monitors[rank].reset();
    Standing last;
    last.beat = 77;
    last.stage = stage;
    last.step = 1;
    const std::string line = encode(last);
    store->set(std::to_string(rank), std::vector<uint8_t>(line.begin(), line.end()));
  }

  /// Whether the others can read that this rank is at `stage` of `step`.
  [[nodiscard]] bool has_said(size_t rank, Stage stage, int64_t step) const {
    const std::string key = std::to_string(rank);
    if (!store->check({key})) return false;
    const std::vector<uint8_t> line = store->get(key);
    const auto standing = decode(std::string(line.begin(), line.end()));
    return standing && standing->stage == stage && standing->step == step;
  }

  [[nodiscard]] std::string verdict(size_t rank) const {
    try {
      monitors[rank]->raise_if_hopeless();
      return "";
    } catch (const PeerError& error) {
      return error.what();
    }
  }

  c10::intrusive_ptr<FragileStore> store;
  std::vector<std::shared_ptr<Progress>> progress;
  std::vector<std::shared_ptr<Monitor>> monitors;
};

/// What is printed on stderr until `phrase` is among it, or for as long as a test has patience.
std::string printed(const std::string& phrase) {
  std::string text;
  (void)eventually([&] {
    ::testing::internal::CaptureStderr();
    std::this_thread::sleep_for(5 * kStep);
    text += ::testing::internal::GetCapturedStderr();
    return text.find(phrase) != std::string::npos;
  });
  return text;
}

TEST(Monitor, ReportsWhereTheMissingRankStandsAfterTheThreshold) {
  Ranks ranks(2);
  ranks.progress[1]->next_step();
  ASSERT_TRUE(eventually([&] { return ranks.has_said(1, Stage::kForward, 1); }));
  ranks.progress[0]->next_step();
  ranks.progress[0]->enter(Stage::kBucketWait);
  EXPECT_THAT(printed("[LS-022]"), AllOf(HasSubstr("[rank 0] waits for"), HasSubstr("rank 1 is in forward of step 1"),
                                         Not(HasSubstr("[rank 1]"))));
  EXPECT_EQ(ranks.verdict(0), "") << "slow is not hopeless";
}

TEST(Monitor, KeepsQuietAboutShortWaits) {
  Ranks ranks(2, std::chrono::minutes(10));
  ranks.progress[0]->enter(Stage::kBucketWait);
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(eventually([&] { return ranks.progress[0]->look().since_ms > 1500; }));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Monitor, AFailureElsewhereMakesWaitingHopelessUntilTheWaitEnds) {
  Ranks ranks(3);
  ranks.progress[0]->enter(Stage::kBucketWait);
  EXPECT_EQ(ranks.verdict(0), "");
  ranks.monitors[2]->publish_failure("[rank 2] oops [LS-006]");
  ASSERT_TRUE(eventually([&] { return !ranks.verdict(0).empty(); }));
  EXPECT_THAT(ranks.verdict(0), AllOf(HasSubstr("[rank 0]"), HasSubstr("rank 2 has failed: [rank 2] oops [LS-006]")));
  EXPECT_EQ(ranks.verdict(1), "") << "it does not wait";
  ranks.progress[0]->enter(Stage::kForward);
  EXPECT_TRUE(eventually([&] { return ranks.verdict(0).empty(); }));
}

TEST(Monitor, AHopelessWaitAbortsTheCollectivesOnceAndForGood) {
  Ranks ranks(2);
  std::mutex mutex;
  std::vector<std::string> reasons;
  ranks.monitors[0]->set_abort([&](const std::string& reason) {
    const std::lock_guard lock(mutex);
    reasons.push_back(reason);
    return true;
  });
  const auto count = [&] {
    const std::lock_guard lock(mutex);
    return reasons.size();
  };
  EXPECT_NO_THROW(ranks.monitors[0]->raise_if_lost());
  ranks.progress[0]->enter(Stage::kBucketWait);
  ranks.monitors[1]->publish_failure("oops");
  ASSERT_TRUE(eventually([&] { return count() == 1; }));
  EXPECT_THAT(reasons.front(), AllOf(HasSubstr("rank 1 has failed: oops"), HasSubstr("[LS-020]")));
  ranks.progress[0]->enter(Stage::kForward);
  EXPECT_TRUE(eventually([&] { return ranks.verdict(0).empty(); }));
  ranks.progress[0]->enter(Stage::kBucketWait);
  EXPECT_TRUE(eventually([&] { return !ranks.verdict(0).empty(); }));
  EXPECT_EQ(count(), 1U);
  EXPECT_THAT([&] { ranks.monitors[0]->raise_if_lost(); }, ThrowsMessage<PeerError>(HasSubstr("rank 1 has failed")));
}

TEST(Monitor, WithNothingToAbortAHopelessWaitIsForgottenWhenItEnds) {
  Ranks ranks(2);
  std::atomic<int> calls = 0;
  ranks.monitors[0]->set_abort([&](const std::string&) {
    ++calls;
    return false;
  });
  ranks.progress[0]->enter(Stage::kBucketWait);
  ranks.monitors[1]->publish_failure("oops");
  ASSERT_TRUE(eventually([&] { return calls == 1; }));
  ranks.progress[0]->enter(Stage::kForward);
  EXPECT_TRUE(eventually([&] { return ranks.verdict(0).empty(); }));
  EXPECT_NO_THROW(ranks.monitors[0]->raise_if_lost());
}

TEST(Monitor, ACallThatDoesNotComeBackIsAWaitToo) {
  Ranks ranks(2);
  std::atomic<bool> aborted = false;
  ranks.monitors[0]->set_abort([&](const std::string&) { return aborted = true; });
  ranks.progress[0]->next_step();
  ranks.progress[0]->enter(Stage::kBackward);
  ranks.monitors[1]->publish_failure("oops");
  {
    const Monitor::Call call(*ranks.monitors[0], "the bus");
    { const Monitor::Call inner(*ranks.monitors[0], "the driver"); }  // the outer one goes on
    ASSERT_TRUE(eventually([&] { return aborted.load(); }));
  }
  EXPECT_THAT([&] { ranks.monitors[0]->raise_if_lost(); },
              ThrowsMessage<PeerError>(AllOf(HasSubstr("waits for the bus of step 1"),
                                             HasSubstr("rank 1 has failed: oops"), HasSubstr("[LS-020]"))));
  EXPECT_TRUE(eventually([&] { return ranks.verdict(0).empty(); })) << "it is in no call any more";
}

TEST(Monitor, ToTheOthersACallThatTakesLongIsNoWait) {
  Ranks ranks(2);
  ranks.progress[0]->next_step();
  ranks.progress[0]->enter(Stage::kBackward);
  const Monitor::Call call(*ranks.monitors[0], "its hook");
  ranks.progress[1]->next_step();
  ranks.progress[1]->next_step();
  ranks.progress[1]->enter(Stage::kBufferWait);
  EXPECT_THAT(printed("waiting for its hook"),
              HasSubstr("rank 0 is in backward of step 1, waiting for its hook, since"));
  ASSERT_TRUE(eventually([&] { return ranks.progress[1]->look().since_ms > 3 * kThreshold.count(); }));
  EXPECT_EQ(ranks.verdict(1), "") << "their collectives may still match";
}

TEST(Monitor, ARankThatIsDestroyedSaysThatItLeaves) {
  Ranks ranks(2);
  ranks.progress[0]->enter(Stage::kBucketWait);
  ranks.monitors[1].reset();
  ASSERT_TRUE(eventually([&] { return !ranks.verdict(0).empty(); }));
  EXPECT_THAT(ranks.verdict(0), AllOf(HasSubstr("rank 1 has dropped its model or ended"), HasSubstr("[LS-021]")));
}

TEST(Monitor, ARankThatIsDestroyedWithinAStepSaysSo) {
  Ranks ranks(2);
  ranks.progress[1]->next_step();
  ranks.monitors[1].reset();
  EXPECT_TRUE(ranks.has_said(1, Stage::kLeftInStep, 1));
}

TEST(Monitor, ARankThatHasFailedDoesNotSayThatItLeft) {
  Ranks ranks(2);
  ranks.progress[1]->fail("oops");
  ranks.monitors[1].reset();
  ranks.progress[0]->enter(Stage::kBucketWait);
  ASSERT_TRUE(eventually([&] { return !ranks.verdict(0).empty(); }));
  EXPECT_THAT(ranks.verdict(0), HasSubstr("rank 1 has failed: oops"));
}

TEST(Monitor, ADeadRankIsReportedAtOnceAndHopelessAfterTheThreshold) {
  Ranks ranks(2);
  ranks.kill(1, Stage::kForward);
  ranks.progress[0]->enter(Stage::kBucketWait);
  ASSERT_TRUE(eventually([&] { return !ranks.verdict(0).empty(); }));
  EXPECT_THAT(ranks.verdict(0), AllOf(HasSubstr("rank 1 has not been heard of"), HasSubstr("in forward of step 1"),
                                      HasSubstr("[LS-021]")));
}

TEST(Monitor, BothRanksWhoseCollectiveFailedBlameTheDeadOneAndNotEachOther) {
  Ranks ranks(3, std::chrono::seconds(30));  // of no importance: a collective has failed
  ranks.kill(1, Stage::kBackward);
  const auto begin = steady_clock::now();
  std::vector<std::string> causes(3);
  std::vector<std::thread> threads;
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    ranks.progress[rank]->enter(Stage::kBucketWait);
    threads.emplace_back(
        [&, rank] { causes[rank] = ranks.monitors[rank]->explain_failure("Connection reset by peer").text; });
  }
  for (std::thread& thread : threads) thread.join();
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_THAT(causes[rank], AllOf(HasSubstr(fmt::format("[rank {}] waits for", rank)), HasSubstr("rank 1"),
                                    HasSubstr("has probably died"), HasSubstr("[LS-021]")));
    EXPECT_THAT(ranks.monitors[rank]->lines()[rank]->detail, HasSubstr("rank 1"));
  }
  EXPECT_LT(steady_clock::now() - begin, PeerWatch::kSilence + std::chrono::seconds(3));
}

TEST(Monitor, ASlowStoreDoesNotHideADeath) {
  Ranks ranks(2);
  ranks.kill(1, Stage::kForward);
  ranks.store->slow_down(milliseconds(1200));  // two lines a look: the second ends after silence, but not of 3.5 s
  EXPECT_THAT(ranks.monitors[0]->explain_failure("Connection reset by peer").text,
              HasSubstr("rank 1 has not been heard of"));
}

TEST(Monitor, AFailureElsewhereExplainsOursAtOnce) {
  Ranks ranks(2);
  ranks.monitors[1]->publish_failure("[rank 1] oops [LS-006]");
  const auto begin = steady_clock::now();
  EXPECT_THAT(ranks.monitors[0]->explain_failure("Connection reset by peer").text,
              HasSubstr("rank 1 has failed: [rank 1]"));
  EXPECT_LT(steady_clock::now() - begin, PeerWatch::kSilence);
}

TEST(Monitor, AFailureWithoutACauseElsewhereIsPublishedAsOurOwn) {
  Ranks ranks(2);
  ranks.progress[0]->enter(Stage::kBucketWait);
  EXPECT_THAT(ranks.monitors[0]->explain_failure("a cable").text, HasSubstr("rank 1 is wrapping its model"));
  const auto line = ranks.monitors[1]->lines()[0];
  ASSERT_TRUE(line);
  EXPECT_EQ(line->stage, Stage::kFailed);
  EXPECT_EQ(line->detail, "a cable");
}

TEST(Monitor, AStoreThatIsGoneIsTakenForItsHostsDeath) {
  Ranks ranks(2);
  ranks.progress[0]->enter(Stage::kBucketWait);
  ranks.store->cut();
  EXPECT_THAT(ranks.monitors[0]->explain_failure("Connection reset by peer").text,
              AllOf(HasSubstr("[rank 0]"), HasSubstr("store does not answer"), HasSubstr("rank 0, or the launcher"),
                    HasSubstr("[LS-021]"), Not(HasSubstr("Broken pipe"))));
  ranks.progress[1]->enter(Stage::kBucketWait);
  ASSERT_TRUE(eventually([&] { return !ranks.verdict(1).empty(); }));
  EXPECT_THAT(ranks.verdict(1), AllOf(HasSubstr("[rank 1] waits since"), HasSubstr("store does not answer")));
}

TEST(Monitor, DumpsAndListsWhereAllRanksStand) {
  Ranks ranks(3);
  ranks.progress[1]->next_step();
  ranks.store->deleteKey("2");
  ASSERT_TRUE(eventually([&] {
    const auto line = ranks.monitors[0]->lines()[1];
    return line && line->stage == Stage::kForward;
  }));
  ranks.progress[0]->enter(Stage::kBackward);
  EXPECT_EQ(ranks.monitors[0]->lines()[0]->stage, Stage::kBackward) << "our own line is not a second old";
  Monitor::request_dump();
  EXPECT_THAT(printed("[rank 0] where all ranks stand"), HasSubstr("  rank 1 is in forward of step 1"));
}

TEST(MonitorStore, GivesEachReplicaAPlaceOfItsOwn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto first = monitor_store(store, "some group", 0);
  const auto second = monitor_store(store, "some group", 0);
  const auto of_peer = monitor_store(store, "some group", 1);
  ASSERT_TRUE(first && second && of_peer);
  first->set("0", std::vector<uint8_t>{1});
  EXPECT_FALSE(second->check({"0"}));
  EXPECT_TRUE(of_peer->check({"0"})) << "the first replica of the other rank";
  EXPECT_FALSE(monitor_store(nullptr, "some group", 0));
}

// ---- waits that are watched ----

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
