// Counting gradients: who may leave when, who is missing, and that nothing is allocated on the way.
#include "core/backward_tracker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "plan_testing.h"

namespace {
thread_local size_t allocations = 0;

void* counted_malloc(size_t size) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
}  // namespace

// Replaced for the whole test program, to count what the tracker allocates. Not inlined: GCC 12 would look into one
// half of a new-delete pair and warn of a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  if (void* memory = counted_malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept { return counted_malloc(size); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

using Firings = std::vector<uint32_t>;

std::vector<int> begin(BackwardTracker& tracker, const Firings& firings) {
  return numbers(tracker.begin(firings).ids());
}
std::vector<int> ready(BackwardTracker& tracker, size_t param) {
  return numbers(tracker.mark_ready(param_id(param)).ids());
}
std::vector<int> missing(const BackwardTracker& tracker) { return numbers(tracker.missing()); }

TEST(BackwardTracker, LetsABucketLeaveWithItsLastGradient) {
  const BucketPlan plan = plan_with_bucket_sizes({2, 1});  // {0, 1}, {2}
  BackwardTracker tracker(plan);
  EXPECT_THAT(begin(tracker, {1, 1, 1}), IsEmpty());

  EXPECT_THAT(ready(tracker, 1), IsEmpty());
  EXPECT_THAT(ready(tracker, 0), ElementsAre(0));
  EXPECT_FALSE(tracker.all_left());
  EXPECT_THAT(ready(tracker, 2), ElementsAre(1));
  EXPECT_TRUE(tracker.all_left());
}

TEST(BackwardTracker, HoldsBackABucketThatIsReadyOutOfTurn) {
  const BucketPlan plan = plan_with_bucket_sizes({1, 1, 1});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 1, 1});

  EXPECT_THAT(ready(tracker, 1), IsEmpty());
  EXPECT_THAT(ready(tracker, 0), ElementsAre(0, 1));

  EXPECT_THAT(missing(tracker), ElementsAre(2));
  EXPECT_EQ(tracker.num_left(), 2U);
}

TEST(BackwardTracker, WaitsForEveryAnnouncedReport) {
  const BucketPlan plan = plan_with_bucket_sizes({1});
  BackwardTracker tracker(plan);
  begin(tracker, {3});

  EXPECT_THAT(ready(tracker, 0), IsEmpty());
  EXPECT_THAT(ready(tracker, 0), IsEmpty());
  EXPECT_FALSE(tracker.complete(param_id(0)));
  EXPECT_THAT(ready(tracker, 0), ElementsAre(0));
  EXPECT_TRUE(tracker.complete(param_id(0)));
}

TEST(BackwardTracker, LetsBucketsThatWaitForNothingLeaveAtOnce) {
  const BucketPlan plan = plan_with_bucket_sizes({1, 2, 1, 1});
  BackwardTracker tracker(plan);

  EXPECT_THAT(begin(tracker, {0, 0, 0, 1, 0}), ElementsAre(0, 1));  // 3 is held back by 2

  EXPECT_THAT(missing(tracker), ElementsAre(3));
  EXPECT_THAT(ready(tracker, 3), ElementsAre(2, 3));
}

TEST(BackwardTracker, NeverWaitsForParametersWithoutElements) {
  const BucketPlan plan(std::vector<ParamSpec>{dense(0), dense(0), dense(1)}, {group({0}), group({1, 2})});
  BackwardTracker tracker(plan);

  EXPECT_THAT(begin(tracker, {1, 1, 1}), ElementsAre(0));
  EXPECT_TRUE(tracker.complete(param_id(1)));
  EXPECT_THAT(missing(tracker), ElementsAre(2));
  EXPECT_THAT(ready(tracker, 2), ElementsAre(1));
}

TEST(BackwardTracker, IgnoresAReportBeyondTheAnnouncedNumber) {
  const BucketPlan plan = plan_with_bucket_sizes({2, 1});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 1, 0});

  ready(tracker, 0);
  EXPECT_THAT(ready(tracker, 0), IsEmpty());
  EXPECT_THAT(ready(tracker, 2), IsEmpty());
  EXPECT_THAT(missing(tracker), ElementsAre(1));
  EXPECT_THAT(ready(tracker, 1), ElementsAre(0, 1));
  EXPECT_THAT(ready(tracker, 1), IsEmpty());
}

TEST(BackwardTracker, TellsWhoseBucketHasLeft) {
  const BucketPlan plan = plan_with_bucket_sizes({2, 1});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 0, 1});

  EXPECT_FALSE(tracker.has_left(param_id(1)));
  ready(tracker, 0);
  EXPECT_TRUE(tracker.has_left(param_id(1)));
  EXPECT_FALSE(tracker.has_left(param_id(2)));
}

TEST(BackwardTracker, HandsOutTheRestWhenThePassIsFinishedAndStillKnowsWhoIsMissing) {
  const BucketPlan plan = plan_with_bucket_sizes({1, 1, 1});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 1, 1});
  ready(tracker, 0);

  EXPECT_THAT(numbers(tracker.finish().ids()), ElementsAre(1, 2));

  EXPECT_THAT(missing(tracker), ElementsAre(1, 2));
  EXPECT_TRUE(tracker.all_left());
  EXPECT_TRUE(tracker.has_left(param_id(2)));
  EXPECT_TRUE(tracker.finish().empty());
  EXPECT_THAT(ready(tracker, 1), IsEmpty()) << "a latecomer must not send its bucket again";
}

TEST(BackwardTracker, ForgetsAnAbandonedPass) {
  const BucketPlan plan = plan_with_bucket_sizes({1, 2});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 5, 1});
  ready(tracker, 0);
  ready(tracker, 1);

  EXPECT_THAT(begin(tracker, {1, 1, 1}), IsEmpty());

  EXPECT_EQ(tracker.num_left(), 0U);
  EXPECT_THAT(missing(tracker), ElementsAre(0, 1, 2));
  EXPECT_THAT(ready(tracker, 2), IsEmpty());
  EXPECT_THAT(ready(tracker, 1), IsEmpty());
  EXPECT_THAT(ready(tracker, 0), ElementsAre(0, 1));
}

TEST(BackwardTracker, WaitsForNothingBeforeTheFirstPass) {
  const BucketPlan plan = plan_with_bucket_sizes({1});
  BackwardTracker tracker(plan);

  EXPECT_THAT(ready(tracker, 0), IsEmpty());
  EXPECT_THAT(missing(tracker), IsEmpty());
  EXPECT_EQ(tracker.num_left(), 0U);
}

TEST(BackwardTracker, HasLeftEntirelyWhenThePlanIsEmpty) {
  const BucketPlan plan({}, {});
  BackwardTracker tracker(plan);

  EXPECT_THAT(begin(tracker, {}), IsEmpty());
  EXPECT_TRUE(tracker.all_left());
}

TEST(BackwardTracker, RefusesFiringsOfAnotherLengthAndKeepsItsPass) {
  const BucketPlan plan = plan_with_bucket_sizes({1, 1});
  BackwardTracker tracker(plan);
  begin(tracker, {1, 1});
  ready(tracker, 0);

  EXPECT_THAT(([&] { tracker.begin(Firings{1}); }),
              ThrowsMessage<std::invalid_argument>(HasSubstr("1 firing counts for 2 parameters")));

  EXPECT_EQ(tracker.num_left(), 1U);
  EXPECT_THAT(missing(tracker), ElementsAre(1));
}

TEST(BackwardTracker, AllocatesNothingDuringAPass) {
  const BucketPlan plan = plan_with_bucket_sizes({10, 20, 30});
  BackwardTracker tracker(plan);
  const Firings firings(60, 2);

  const size_t before = allocations;
  tracker.begin(firings);
  for (size_t i = 120; i > 0; --i) tracker.mark_ready(param_id((i - 1) / 2));
  tracker.finish();
  const size_t after = allocations;
  const BackwardTracker another(plan);
  const size_t control = allocations;

  EXPECT_EQ(after - before, 0U);
  EXPECT_EQ(control - after, 2U) << "the counter does not count";
}

BucketPlan random_plan(Random& random) {
  const std::vector<ParamSpec> params = random.params();
  return {params, group_by_arrival(params, random.permutation(params.size()), random.limits())};
}

/// The slow and obvious tracker: recounts everything at every question.
struct Oracle {
  const BucketPlan& plan;
  Firings to_come;

  size_t leading_complete_buckets() const {
    const auto is_complete = [&](const Bucket& bucket) {
      return std::ranges::all_of(bucket.params, [&](ParamId id) { return to_come[index(id)] == 0; });
    };
    return static_cast<size_t>(std::ranges::find_if_not(plan.buckets(), is_complete) - plan.buckets().begin());
  }
  std::vector<int> missing() const {
    std::vector<int> result;
    for (size_t i = 0; i < to_come.size(); ++i) {
      if (to_come[i] > 0) result.push_back(static_cast<int>(i));
    }
    return result;
  }
};

/// One pass with reports in random order, given up somewhere in one case of three. Every bucket leaves exactly once and
/// in plan order, because each answer is the range between two counts of the oracle.
void run_random_pass(const BucketPlan& plan, BackwardTracker& tracker, Random& random) {
  Firings firings(plan.num_params());
  for (uint32_t& count : firings) count = random.one_in(4) ? static_cast<uint32_t>(random.below(4)) : 1;
  Oracle oracle{plan, firings};
  std::vector<ParamId> reports;
  for (size_t i = 0; i < firings.size(); ++i) {
    if (plan.slot(param_id(i)).numel == 0) oracle.to_come[i] = 0;
    reports.insert(reports.end(), oracle.to_come[i], param_id(i));
  }
  random.shuffle(reports);
  if (random.one_in(3)) reports.resize(random.below(reports.size() + 1));

  const BucketRange at_once = tracker.begin(firings);
  ASSERT_EQ(at_once.first, 0U);
  size_t left = oracle.leading_complete_buckets();
  ASSERT_EQ(at_once.last, left);
  for (const ParamId id : reports) {
    --oracle.to_come[index(id)];
    const BucketRange range = tracker.mark_ready(id);
    ASSERT_EQ(range.first, left);
    left = oracle.leading_complete_buckets();
    ASSERT_EQ(range.last, left);
    ASSERT_EQ(tracker.num_left(), left);
    ASSERT_EQ(tracker.complete(id), oracle.to_come[index(id)] == 0);
    ASSERT_EQ(missing(tracker), oracle.missing());
  }
  if (random.one_in(2)) {  // else the next begin follows an abandoned pass
    const BucketRange rest = tracker.finish();
    ASSERT_EQ(rest.first, left);
    ASSERT_EQ(rest.last, plan.num_buckets());
    ASSERT_EQ(missing(tracker), oracle.missing());
  }
}

TEST(BackwardTracker, AgreesWithARecountInRandomPassesOnRandomPlans) {
  Random random(4);
  for (int round = 0; round < 1000; ++round) {
    SCOPED_TRACE(round);
    const BucketPlan plan = random_plan(random);
    BackwardTracker tracker(plan);
    for (int pass = 0; pass < 4; ++pass) run_random_pass(plan, tracker, random);
    if (HasFatalFailure()) return;
  }
}

TEST(BackwardTracker, SharesItsPlanWithTrackersOfOtherThreads) {
  Random random(5);
  const BucketPlan plan = random_plan(random);
  std::vector<std::thread> ranks;
  for (uint64_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&plan, rank] {
      Random own(100 + rank);
      BackwardTracker tracker(plan);
      for (int pass = 0; pass < 100; ++pass) run_random_pass(plan, tracker, own);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace lockstep
