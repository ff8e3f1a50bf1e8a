// What ranks write about themselves, and what one that waits concludes from it.
#include "core/peer_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/progress.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Labels = std::vector<std::string>;

constexpr milliseconds kThreshold{2000};
const PeerWatch::TimePoint kNow{std::chrono::hours(1)};

Standing standing(Stage stage, uint32_t step, int64_t since_ms = 0, std::string detail = "", uint64_t beat = 1) {
  return {.beat = beat, .stage = stage, .step = step, .since_ms = since_ms, .detail = std::move(detail)};
}

Standing waiting(int64_t since_ms = 0, uint32_t step = 7) {
  return standing(Stage::kBucketWait, step, since_ms, "bucket 0");
}

/// What rank 0 concludes at its first look, in which nobody can have been silent.
PeerWatch::Judgement judged(PeerWatch::Lines lines, const Standing& mine) {
  return PeerWatch(0, kThreshold).judge(lines, mine, kNow);
}

// ---- lines ----

TEST(PeerLine, ComesBackAsItWasWritten) {
  const Standing written{.beat = 1ULL << 40,
                         .stage = Stage::kLeft,
                         .step = 4294967295,
                         .since_ms = 123456789012,
                         .detail = "a text\nwith \x1f separators, and [LS-011]"};
  const std::optional<Standing> read = decode(encode(written));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->beat, written.beat);
  EXPECT_EQ(read->stage, written.stage);
  EXPECT_EQ(read->step, written.step);
  EXPECT_EQ(read->since_ms, written.since_ms);
  EXPECT_EQ(read->detail, written.detail);
}

TEST(PeerLine, EveryStageComesBack) {
  for (int stage = 0; stage <= static_cast<int>(Stage::kLeftInStep); ++stage) {
    const auto read = decode(encode(standing(static_cast<Stage>(stage), 3)));
    ASSERT_TRUE(read) << stage;
    EXPECT_EQ(static_cast<int>(read->stage), stage);
  }
}

TEST(PeerLine, IsRefusedWhenMalformed) {
  const std::string good = encode(standing(Stage::kForward, 3, 4, "x"));
  EXPECT_TRUE(decode(good));
  const std::string unknown_stage = encode(standing(static_cast<Stage>(static_cast<int>(Stage::kLeftInStep) + 1), 3));
  for (const std::string& bad :
       {std::string(), std::string("hello"), good.substr(0, 3), unknown_stage,
        std::string("1\x1f-1\x1f") + "3\x1f" + "4\x1fx", std::string("1\x1f") + "2\x1f" + "3\x1f" + "4",
        std::string("x\x1f") + "2\x1f" + "3\x1f" + "4\x1f"}) {
    EXPECT_FALSE(decode(bad)) << bad;
  }
}

TEST(PeerLine, ReadsAsASentence) {
  EXPECT_EQ(sentence(1, standing(Stage::kForward, 41, 12000)), "rank 1 is in forward of step 41 since 12.0 s");
  EXPECT_EQ(sentence(2, standing(Stage::kBucketWait, 5, 1540, "bucket 3")),
            "rank 2 waits for bucket 3 of step 5 since 1.5 s");
  EXPECT_EQ(sentence(0, standing(Stage::kBetweenSteps, 0)), "rank 0 has not begun its first forward since 0.0 s");
  EXPECT_THAT(sentence(0, standing(Stage::kBetweenSteps, 9)), HasSubstr("is between steps, after step 9"));
  EXPECT_THAT(sentence(0, standing(Stage::kBufferWait, 0)), HasSubstr("waits for the other ranks to wrap their model"));
  EXPECT_THAT(sentence(0, standing(Stage::kBufferWait, 2)), HasSubstr("buffers or a bucket plan in forward of step 2"));
}

// ---- where a replica stands ----

TEST(Progress, CountsStepsAndKnowsItsStage) {
  Progress progress;
  EXPECT_EQ(progress.stage(), Stage::kConstruction);
  progress.next_step();
  progress.next_step();
  EXPECT_EQ(progress.stage(), Stage::kForward);
  progress.enter(Stage::kBackward);
  EXPECT_EQ(progress.step(), 2U) << "a new stage is in the same step";
  const Standing look = progress.look();
  EXPECT_EQ(look.stage, Stage::kBackward);
  EXPECT_EQ(look.step, 2U);
  EXPECT_LT(look.since_ms, 60000);
  EXPECT_THAT(look.detail, IsEmpty());
}

TEST(Progress, NamesTheBucketItWaitsFor) {
  Progress progress;
  progress.set_labels(std::make_shared<const Labels>(Labels{"bucket 0 ('a')", "bucket 1 ('b')"}));
  progress.enter(Stage::kBucketWait, 1);
  EXPECT_EQ(progress.look().detail, "bucket 1 ('b')");
  progress.enter(Stage::kBucketWait);
  EXPECT_EQ(progress.look().detail, "the other ranks to agree on the pass that begins with bucket 0 ('a'),");
  progress.enter(Stage::kBackward, 1);
  EXPECT_THAT(progress.look().detail, IsEmpty());
  EXPECT_EQ(Progress().look().detail, "");
}

TEST(Progress, KeepsTheTextOfAFailure) {
  Progress progress;
  progress.next_step();
  progress.fail("[rank 0] oops");
  EXPECT_EQ(progress.look().stage, Stage::kFailed);
  EXPECT_EQ(progress.look().step, 1U);
  EXPECT_EQ(progress.look().detail, "[rank 0] oops");
  progress.give_up("because of rank 1");
  EXPECT_EQ(progress.look().stage, Stage::kGaveUp);
  EXPECT_EQ(progress.look().detail, "because of rank 1");
  progress.enter(Stage::kForward);
  EXPECT_THAT(progress.look().detail, IsEmpty());
}

// ---- judgement ----

TEST(PeerWatch, FindsNothingWrongWhenAllWaitForTheSame) {
  const auto judgement = judged({waiting(), waiting(9000), waiting()}, waiting(9000));
  EXPECT_THAT(judgement.error, IsEmpty());
  EXPECT_FALSE(judgement.silent);
  EXPECT_EQ(judgement.report,
            "[rank 0] waits for bucket 0 of step 7 since 9.0 s. All other ranks are here too. [LS-022]");
}

TEST(PeerWatch, NamesThoseWhoAreMissingAndNotThoseWhoAreHere) {
  const auto judgement =
      judged({waiting(), waiting(), standing(Stage::kForward, 7, 5000), std::nullopt}, waiting(9000));
  EXPECT_THAT(judgement.error, IsEmpty()) << "slow is not hopeless";
  EXPECT_THAT(judgement.report, AllOf(StartsWith("[rank 0] waits for bucket 0 of step 7 since 9.0 s. "),
                                      HasSubstr("rank 2 is in forward of step 7 since 5.0 s"),
                                      HasSubstr("rank 3 has not reached the construction of its model"),
                                      Not(HasSubstr("rank 1")), HasSubstr("[LS-022]")));
}

TEST(PeerWatch, DoesNotReportOnItself) {
  PeerWatch watch(1, kThreshold);
  const auto judgement = watch.judge({waiting(), standing(Stage::kFailed, 7, 0, "me")}, waiting(9000), kNow);
  EXPECT_THAT(judgement.error, IsEmpty());
  EXPECT_THAT(judgement.report, StartsWith("[rank 1] waits"));
}

TEST(PeerWatch, AFailedRankIsHopelessAtOnceInItsOwnWords) {
  const auto judgement =
      judged({waiting(), waiting(), standing(Stage::kFailed, 6, 10, "[rank 2] no grad [LS-006]")}, waiting(10));
  EXPECT_THAT(judgement.error, AllOf(StartsWith("[rank 0] waits for bucket 0"), HasSubstr("in vain"),
                                     HasSubstr("rank 2 has failed: [rank 2] no grad [LS-006]")));
  EXPECT_THAT(judgement.error, Not(HasSubstr("[LS-020]"))) << "the code is that of the cause";
  EXPECT_THAT(judged({waiting(), standing(Stage::kFailed, 6, 10, "oops")}, waiting(10)).error, HasSubstr("[LS-020]"));
}

TEST(PeerWatch, ARankThatLeftIsHopeless) {
  const auto judgement = judged({waiting(), standing(Stage::kLeft, 6, 10)}, waiting(10));
  EXPECT_THAT(judgement.error,
              AllOf(HasSubstr("rank 1 has dropped its model or ended after step 6"), HasSubstr("[LS-021]")));
}

TEST(PeerWatch, TheCodeIsThatOfTheRankThatIsNamed) {
  const auto judgement =
      judged({waiting(), standing(Stage::kLeft, 6, 10), standing(Stage::kFailed, 6, 10, "oops")}, waiting(10));
  EXPECT_THAT(judgement.error,
              AllOf(HasSubstr("rank 1 has dropped its model"), HasSubstr("[LS-021]"), Not(HasSubstr("[LS-020]"))));
}

TEST(PeerWatch, ARankThatGaveUpBecauseOfAnotherIsTheLastToBlame) {
  const Standing gave_up = standing(Stage::kGaveUp, 7, 10, "[rank 1] waits in vain: rank 2 is dead");
  const auto both = judged({waiting(), gave_up, standing(Stage::kFailed, 7, 10, "the cause")}, waiting(10));
  EXPECT_THAT(both.error, AllOf(HasSubstr("rank 2 has failed: the cause"), Not(HasSubstr("rank 1 has"))));
  const auto alone = judged({waiting(), gave_up, waiting()}, waiting(10));
  EXPECT_THAT(alone.error, HasSubstr("rank 1 has given up: [rank 1] waits in vain: rank 2 is dead"));
  const auto searching = judged({waiting(), standing(Stage::kGaveUp, 7, 10), waiting()}, waiting(10));
  EXPECT_THAT(searching.error, IsEmpty()) << "it has not found the cause yet";
  EXPECT_THAT(searching.report, HasSubstr("rank 1 has given up in step 7"));
}

/// Looks at rank 1 with beat 1 first, and with `beat` after `later`.
PeerWatch::Judgement looked_twice(milliseconds later, uint64_t beat, const Standing& mine,
                                  PeerWatch::Because because = PeerWatch::Because::kWaiting,
                                  milliseconds threshold = kThreshold) {
  PeerWatch watch(0, threshold);
  (void)watch.judge({waiting(), standing(Stage::kForward, 7, 0, "", 1)}, mine, kNow, because);
  return watch.judge({waiting(), standing(Stage::kForward, 7, 0, "", beat)}, mine, kNow + later, because);
}

TEST(PeerWatch, ARankWhoseLineStandsStillIsPresumedDead) {
  const auto dead = looked_twice(PeerWatch::kSilence, 1, waiting(10));
  EXPECT_TRUE(dead.silent);
  EXPECT_THAT(dead.error,
              AllOf(HasSubstr("rank 1 has not been heard of for 3.5 s and has probably died; at last it is in forward"),
                    HasSubstr("[LS-021]")));
  const auto not_yet = looked_twice(PeerWatch::kSilence - milliseconds(1), 1, waiting(10));
  EXPECT_FALSE(not_yet.silent);
  EXPECT_THAT(not_yet.error, IsEmpty());
  const auto alive = looked_twice(milliseconds(60000), 2, waiting(10));
  EXPECT_FALSE(alive.silent);
  EXPECT_THAT(alive.error, IsEmpty());
}

TEST(PeerWatch, SilenceIsHopelessAfterTheThresholdOrWhenACollectiveHasFailed) {
  constexpr milliseconds kLong{30000};
  const auto waits = looked_twice(PeerWatch::kSilence, 1, waiting(10), PeerWatch::Because::kWaiting, kLong);
  EXPECT_TRUE(waits.silent) << "reported";
  EXPECT_THAT(waits.error, IsEmpty()) << "and no more";
  EXPECT_THAT(looked_twice(kLong, 1, waiting(10), PeerWatch::Because::kWaiting, kLong).error, HasSubstr("[LS-021]"));
  const auto failed = looked_twice(PeerWatch::kSilence, 1, waiting(10), PeerWatch::Because::kCollectiveFailed, kLong);
  EXPECT_THAT(failed.error, HasSubstr("rank 1 has not been heard of"));
}

TEST(PeerWatch, WhenOnlyTheDeviceWaitsTheDeadAndTheFailedAreReasonsAndNobodyElse) {
  const auto because = PeerWatch::Because::kPerhapsWaiting;
  constexpr milliseconds kLong{30000};
  EXPECT_THAT(looked_twice(kLong, 1, waiting(60000), because, kLong).error, HasSubstr("[LS-021]"));
  EXPECT_THAT(looked_twice(PeerWatch::kSilence, 1, waiting(60000), because, kLong).error, IsEmpty()) << "a slow host";
  EXPECT_THAT(looked_twice(kLong, 2, waiting(60000), because, kLong).error, IsEmpty()) << "it is alive";
  const auto with = [&](const Standing& other) {
    return PeerWatch(0, kThreshold).judge({waiting(), other}, waiting(9000), kNow, because).error;
  };
  EXPECT_THAT(with(standing(Stage::kFailed, 7, 10, "oops")), HasSubstr("rank 1 has failed: oops"));
  EXPECT_THAT(with(standing(Stage::kLeft, 7, 10)), IsEmpty()) << "it may have done all that we wait for";
  EXPECT_THAT(with(standing(Stage::kLeftInStep, 8, 10)), IsEmpty()) << "likewise";
  EXPECT_THAT(with(standing(Stage::kLeftInStep, 7, 10)),
              HasSubstr("rank 1 has dropped its model or ended in the middle"));
  EXPECT_THAT(with(standing(Stage::kLeft, 6, 10)), HasSubstr("after step 6"));
  EXPECT_THAT(with(standing(Stage::kBufferWait, 8, 9000)), IsEmpty()) << "it waits for our host";
}

TEST(PeerWatch, TheReportNeverSaysThatAllAreHereWhenOneHasFailedOrACallTakesLong) {
  const auto report = [&](const Standing& other, PeerWatch::Because because) {
    return PeerWatch(0, kThreshold).judge({waiting(), other}, waiting(9000), kNow, because).report;
  };
  EXPECT_THAT(report(standing(Stage::kFailed, 7, 10, "oops"), PeerWatch::Because::kWaiting),
              HasSubstr("rank 1 has failed: oops"));
  EXPECT_THAT(report(waiting(60000), PeerWatch::Because::kWaiting), HasSubstr("All other ranks are here too"));
  EXPECT_THAT(report(waiting(60000), PeerWatch::Because::kPerhapsWaiting), HasSubstr("rank 1 waits for"));
}

TEST(PeerWatch, RanksThatAllWaitForDifferentThingsWillDoSoForEver) {
  const Standing elsewhere = standing(Stage::kBufferWait, 8, 2000);
  const auto judgement = judged({waiting(), elsewhere}, waiting(2000));
  EXPECT_THAT(judgement.error, AllOf(HasSubstr("all ranks wait, but not for the same"),
                                     HasSubstr("rank 1 waits for buffers"), HasSubstr("[LS-029]")));
  EXPECT_THAT(judged({waiting(), elsewhere}, waiting(1999)).error, IsEmpty()) << "we have only just come";
  EXPECT_THAT(judged({waiting(), standing(Stage::kBufferWait, 8, 1999)}, waiting(2000)).error, IsEmpty());
  EXPECT_THAT(judged({waiting(), elsewhere, standing(Stage::kForward, 8)}, waiting(2000)).error, IsEmpty())
      << "rank 2 may solve it";
  EXPECT_THAT(judged({waiting(), standing(Stage::kForward, 8), elsewhere}, waiting(2000)).error, IsEmpty());
  EXPECT_THAT(judged({waiting(), waiting(2000, 8)}, waiting(2000)).error, HasSubstr("[LS-029]")) << "another step";
}

TEST(PeerWatch, SaysHowToEvaluateOnOneRank) {
  const Standing left = standing(Stage::kLeft, 6);
  EXPECT_THAT(judged({waiting(), left}, standing(Stage::kBufferWait, 3, 10)).error, HasSubstr("`model.module`"));
  EXPECT_THAT(judged({waiting(), left}, standing(Stage::kBufferWait, 0, 10)).error, Not(HasSubstr("`model.module`")));
  EXPECT_THAT(judged({waiting(), left}, waiting(10)).error, Not(HasSubstr("`model.module`")));
}

TEST(PeerWatch, CountsWhatItDoesNotName) {
  PeerWatch::Lines lines(12, standing(Stage::kForward, 7, 1000));
  lines[0] = waiting();
  const std::string report = judged(lines, waiting(9000)).report;
  EXPECT_THAT(report, AllOf(HasSubstr("rank 1 is"), HasSubstr("rank 8 is"), Not(HasSubstr("rank 9 is")),
                            HasSubstr("; and 3 ranks more")));
  lines.resize(9);
  EXPECT_THAT(judged(lines, waiting(9000)).report, AllOf(HasSubstr("rank 8 is"), Not(HasSubstr("more"))));
}

}  // namespace
}  // namespace lockstep
