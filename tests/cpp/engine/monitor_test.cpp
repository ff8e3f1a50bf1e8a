// What a monitor reports, judges and aborts.
#include "comm/monitor.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "core/error.h"
#include "watched_ranks.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

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

}  // namespace
}  // namespace lockstep
