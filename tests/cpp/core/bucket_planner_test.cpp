// Which gradients travel together, and in which order: torch's rules before the first backward, arrival order after.
#include "core/bucket_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan_testing.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int64_t kMiB = 1 << 20;

std::vector<int64_t> limits_of(const std::vector<BucketGroup>& groups) {
  std::vector<int64_t> result;
  for (const BucketGroup& one : groups) result.push_back(one.limit_bytes);
  return result;
}

std::vector<ParamSpec> repeat(size_t count, const std::vector<ParamSpec>& pattern) {
  std::vector<ParamSpec> result;
  for (size_t i = 0; i < count; ++i) result.insert(result.end(), pattern.begin(), pattern.end());
  return result;
}

/// What torch answers: reversed(_compute_bucket_assignment_by_size(tensors, limits, expect_sparse)).
struct TorchCase {
  std::string name;
  std::vector<ParamSpec> params;
  BucketLimits limits;
  std::vector<std::vector<int>> groups;
  std::vector<int64_t> group_limits;
};

void PrintTo(const TorchCase& expected, std::ostream* out) { *out << expected.name; }

class TorchAssignment : public ::testing::TestWithParam<TorchCase> {};

TEST(ChosenLimits, AreTorchsForSmallModelsAndAQuarterOfLargerOnesUpTo100MiB) {
  EXPECT_THAT(chosen_limits(0), ElementsAre(kMiB, 25 * kMiB));
  EXPECT_THAT(chosen_limits(100 * kMiB), ElementsAre(kMiB, 25 * kMiB));
  EXPECT_THAT(chosen_limits(200 * kMiB), ElementsAre(50 * kMiB));
  EXPECT_THAT(chosen_limits(1600 * kMiB), ElementsAre(100 * kMiB));
}

TEST(ChosenLimits, AreASixteenthOfLargeModelsUpTo400MiB) {
  EXPECT_THAT(chosen_limits(3200 * kMiB), ElementsAre(200 * kMiB));
  EXPECT_THAT(chosen_limits(64000 * kMiB), ElementsAre(400 * kMiB));
}

TEST_P(TorchAssignment, IsReproduced) {
  const TorchCase& expected = GetParam();

  const std::vector<BucketGroup> groups = group_by_registration(expected.params, expected.limits);

  EXPECT_EQ(members(groups), expected.groups);
  EXPECT_EQ(limits_of(groups), expected.group_limits);
}

const ParamSpec kFloats50 = dense(50, 0, 4);   // 200 bytes
const ParamSpec kDoubles25 = dense(25, 1, 8);  // 200 bytes of another kind

INSTANTIATE_TEST_SUITE_P(
    BucketPlanner, TorchAssignment,
    ::testing::Values(
        TorchCase{"unlimited_is_one_bucket", repeat(4, {dense(100)}), {kUnlimited}, {{0, 1, 2, 3}}, {kUnlimited}},
        TorchCase{"the_first_bucket_in_registration_order_takes_1_mib",
                  repeat(6, {dense(kMiB / 8)}),  // 0.5 MiB each
                  {kMiB, kMiB * 3 / 2},
                  {{5}, {2, 3, 4}, {0, 1}},
                  {kMiB * 3 / 2, kMiB * 3 / 2, kMiB}},
        TorchCase{
            "reaching_the_limit_exactly_closes", repeat(4, {dense(4)}), {16}, {{3}, {2}, {1}, {0}}, {16, 16, 16, 16}},
        TorchCase{"the_crossing_parameter_is_inside", repeat(4, {dense(3)}), {16}, {{2, 3}, {0, 1}}, {16, 16}},
        TorchCase{"larger_than_the_limit_is_not_split",
                  {dense(100), dense(1), dense(100), dense(1)},
                  {16},
                  {{3}, {1, 2}, {0}},
                  {16, 16, 16}},
        TorchCase{"kinds_fill_side_by_side",
                  repeat(3, {kFloats50, kDoubles25}),
                  {400},
                  {{5}, {4}, {1, 3}, {0, 2}},
                  {400, 400, 400, 400}},
        TorchCase{"the_last_limit_repeats", repeat(4, {dense(10)}), {40, 80}, {{3}, {1, 2}, {0}}, {80, 80, 40}},
        TorchCase{"a_list_of_limits_is_walked_through",
                  repeat(8, {dense(10)}),
                  {40, 80, 120},
                  {{6, 7}, {3, 4, 5}, {1, 2}, {0}},
                  {120, 120, 80, 40}},
        TorchCase{"every_kind_walks_its_own_list",
                  repeat(6, {kFloats50, kDoubles25}),
                  {200, 400},
                  {{11}, {10}, {7, 9}, {6, 8}, {3, 5}, {2, 4}, {1}, {0}},
                  {400, 400, 400, 400, 400, 400, 200, 200}},
        TorchCase{"sparse_is_alone_and_interrupts_nobody",
                  {dense(4), sparse(4), dense(4), sparse(4)},
                  {kUnlimited},
                  {{3}, {1}, {0, 2}},
                  {0, 0, kUnlimited}},
        TorchCase{"without_elements_rides_along", {dense(4), dense(0), dense(4)}, {16}, {{1, 2}, {0}}, {16, 16}}),
    [](const auto& test) { return test.param.name; });

TEST(GroupByRegistration, GivesNoGroupsForNoParameters) {
  EXPECT_THAT(group_by_registration({}, {kUnlimited}), IsEmpty());
}

TEST(GroupByRegistration, PutsGroupsWithoutElementsFirst) {
  const std::vector<ParamSpec> params{dense(0, 0), dense(0, 0), dense(4, 1), dense(4, 2)};

  EXPECT_THAT(members(group_by_registration(params, {16})),
              ElementsAre(ElementsAre(0, 1), ElementsAre(3), ElementsAre(2)));
}

TEST(GroupByRegistration, TakesSizesWhoseSumOverflowsAsUnlimited) {
  const std::vector<ParamSpec> params{dense(kUnlimited / 2), dense(1)};  // 2^64 bytes

  EXPECT_THAT(members(group_by_registration(params, {kUnlimited})), ElementsAre(ElementsAre(1), ElementsAre(0)));
}

TEST(GroupByArrival, FillsAndLaysOutInTheOrderOfArrival) {
  const std::vector<ParamSpec> params = repeat(4, {dense(3)});

  const std::vector<BucketGroup> groups = group_by_arrival(params, group({3, 0, 2, 1}).params, {16});

  EXPECT_THAT(members(groups), ElementsAre(ElementsAre(3, 0), ElementsAre(2, 1)));
}

TEST(GroupByArrival, NumbersBucketsByTheArrivalOfTheirLastMember) {
  // Kind 0 arrives at places 0 and 3, kind 1 at 1 and 2.
  const std::vector<ParamSpec> params{dense(4, 0), dense(4, 1), dense(4, 1), dense(4, 0)};

  const std::vector<BucketGroup> groups = group_by_arrival(params, group({0, 1, 2, 3}).params, {32});

  EXPECT_THAT(members(groups), ElementsAre(ElementsAre(1, 2), ElementsAre(0, 3)));
}

TEST(GroupByArrival, SendsASparseGradientWhenItArrives) {
  const std::vector<ParamSpec> params{dense(4), sparse(4), dense(4)};

  const std::vector<BucketGroup> groups = group_by_arrival(params, group({2, 1, 0}).params, {kUnlimited});

  EXPECT_THAT(members(groups), ElementsAre(ElementsAre(1), ElementsAre(2, 0)));
}

TEST(GroupByArrival, PutsGroupsWithoutElementsFirst) {
  const std::vector<ParamSpec> params{dense(4), dense(0)};

  EXPECT_THAT(members(group_by_arrival(params, group({0, 1}).params, {16})),
              ElementsAre(ElementsAre(1), ElementsAre(0)));
}

TEST(GroupByArrival, WalksThroughTheLimitsFromTheFirstArrival) {
  const std::vector<BucketGroup> groups =
      group_by_arrival(repeat(4, {dense(10)}), group({3, 2, 1, 0}).params, {40, 80});

  EXPECT_THAT(members(groups), ElementsAre(ElementsAre(3), ElementsAre(2, 1), ElementsAre(0)));
  EXPECT_THAT(limits_of(groups), ElementsAre(40, 80, 80));
}

/// Members of each bucket when fp32 parameters of these sizes (in MiB) arrive in order, with one limit in MiB.
std::vector<std::vector<int>> with_tail(const std::vector<int64_t>& sizes, int64_t limit) {
  std::vector<ParamSpec> params;
  std::vector<ParamId> arrival;
  for (const int64_t size : sizes) {
    arrival.push_back(param_id(params.size()));
    params.push_back(dense(size * kMiB / 4));
  }
  return members(with_short_tail(params, group_by_arrival(params, arrival, {limit * kMiB})));
}

TEST(ShortTail, LeavesAQuarterOfTheLastBucketForTheEnd) {
  EXPECT_THAT(with_tail({8, 4, 4, 4, 4}, 8),
              ElementsAre(ElementsAre(0), ElementsAre(1, 2), ElementsAre(3), ElementsAre(4)));
  EXPECT_THAT(with_tail({4, 4, 4, 4}, 100), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3)));
  EXPECT_THAT(with_tail({16, 1, 1, 1, 1, 1, 1}, 100), ElementsAre(ElementsAre(0), ElementsAre(1, 2, 3, 4, 5, 6)));
}

TEST(ShortTail, LetsALargeLastGradientTravelAlone) {
  EXPECT_THAT(with_tail({10, 10, 60}, 100), ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
}

TEST(ShortTail, IsNotCutWhereItWouldNotHelp) {
  EXPECT_THAT(with_tail({1, 1, 1, 1}, 25), ElementsAre(ElementsAre(0, 1, 2, 3))) << "4 MiB";
  EXPECT_THAT(with_tail({1, 1, 60}, 100), ElementsAre(ElementsAre(0, 1, 2))) << "2 of 62 MiB would leave earlier";
  EXPECT_THAT(with_tail({50}, 100), ElementsAre(ElementsAre(0)));
  EXPECT_THAT(with_short_tail({}, {}), IsEmpty());
}

TEST(ShortTail, KeepsTheLimitOfItsBucket) {
  const std::vector<ParamSpec> params = repeat(2, {dense(2 * kMiB)});

  const std::vector<BucketGroup> groups =
      with_short_tail(params, group_by_arrival(params, {{param_id(1), param_id(0)}}, {100 * kMiB}));

  EXPECT_THAT(members(groups), ElementsAre(ElementsAre(1), ElementsAre(0)));
  EXPECT_THAT(limits_of(groups), ElementsAre(100 * kMiB, 100 * kMiB));
}

template <typename Call>
void expect_refused(Call call, const std::string& text) {
  EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(HasSubstr(text)));
}

TEST(BucketPlanner, RefusesLimitsThatAreMissingOrNotPositive) {
  const std::vector<ParamSpec> params{dense(1)};
  const std::vector<ParamId> arrival = group({0}).params;

  expect_refused([&] { (void)group_by_registration(params, {}); }, "no bucket limit");
  expect_refused([&] { (void)group_by_registration(params, {16, 0}); }, "bucket limit 1 is 0 bytes");
  expect_refused([&] { (void)group_by_arrival(params, arrival, {}); }, "no bucket limit");
  expect_refused([&] { (void)group_by_arrival(params, arrival, {-5}); }, "bucket limit 0 is -5 bytes");
}

TEST(GroupByArrival, RefusesAnOrderThatIsNoPermutation) {
  const std::vector<ParamSpec> params = repeat(3, {dense(1)});
  const auto plan_for = [&](const BucketGroup& arrival) {
    return [&params, arrival] { (void)group_by_arrival(params, arrival.params, {16}); };
  };

  expect_refused(plan_for(group({0, 1})), "has 2 entries for 3 parameters");
  expect_refused(plan_for(group({0, 1, 2, 0})), "has 4 entries for 3 parameters");
  expect_refused(plan_for(group({0, 1, 3})), "entry 2 of the arrival order names parameter 3");
  expect_refused(plan_for(group({2, 1, 2})), "entry 2 of the arrival order names parameter 2 for the second time");
}

int64_t bytes_of(const ParamSpec& spec) { return spec.numel * spec.element_size; }

bool has_elements(const BucketGroup& one, const std::vector<ParamSpec>& params) {
  return std::ranges::any_of(one.params, [&](ParamId id) { return params[index(id)].numel > 0; });
}

/// What holds for every grouping of `params` filled in `order`, whatever the numbering of the groups.
void expect_greedy_partition(const std::vector<ParamSpec>& params, const std::vector<ParamId>& order,
                             const BucketLimits& limits, const std::vector<BucketGroup>& groups) {
  std::vector<const BucketGroup*> owner(params.size(), nullptr);
  for (const BucketGroup& one : groups) {
    ASSERT_THAT(one.params, Not(IsEmpty()));
    for (const ParamId id : one.params) {
      ASSERT_EQ(owner[index(id)], nullptr) << "parameter " << index(id) << " is in two groups";
      owner[index(id)] = &one;
      ASSERT_EQ(params[index(id)].kind, params[index(one.params[0])].kind) << "two kinds in one group";
      ASSERT_TRUE(!params[index(id)].sparse || one.params.size() == 1) << "a sparse parameter is not alone";
    }
  }
  ASSERT_THAT(owner, ::testing::Each(::testing::NotNull())) << "a parameter is in no group";

  // Replays each kind in filling order: its groups follow each other, each full but the last, each under its limit.
  std::map<int, std::vector<ParamId>> by_kind;
  for (const ParamId id : order) {
    if (!params[index(id)].sparse) by_kind[params[index(id)].kind].push_back(id);
  }
  for (const auto& [kind, ids] : by_kind) {
    size_t closed = 0;
    for (size_t i = 0; i < ids.size(); ++closed) {
      const BucketGroup& one = *owner[index(ids[i])];
      int64_t before_last = 0;
      int64_t bytes = 0;
      for (const ParamId id : one.params) {
        ASSERT_EQ(id, ids[i++]) << "not the next one of its kind";
        before_last = bytes;
        bytes += bytes_of(params[index(id)]);
      }
      ASSERT_EQ(one.limit_bytes, limits[std::min(closed, limits.size() - 1)]);
      ASSERT_LT(before_last, one.limit_bytes) << "was full before its last member";
      ASSERT_TRUE(i == ids.size() || bytes >= one.limit_bytes) << "was closed early";
    }
  }
}

TEST(BucketPlanner, FillsGreedilyAndNumbersGroupsByTheMomentOfSendingInRandomCases) {
  Random random(2);
  for (int round = 0; round < 5000; ++round) {
    SCOPED_TRACE(round);
    const std::vector<ParamSpec> params = random.params();
    const BucketLimits limits = random.limits();
    const std::vector<ParamId> arrival = random.permutation(params.size());
    std::vector<ParamId> registration = arrival;
    std::ranges::sort(registration);
    std::vector<size_t> place(params.size());
    for (size_t i = 0; i < arrival.size(); ++i) place[index(arrival[i])] = i;

    const std::vector<BucketGroup> first = group_by_registration(params, limits);
    const std::vector<BucketGroup> later = group_by_arrival(params, arrival, limits);

    expect_greedy_partition(params, registration, limits, first);
    expect_greedy_partition(params, arrival, limits, later);
    for (size_t i = 1; i < first.size(); ++i) {
      if (has_elements(first[i - 1], params)) {
        ASSERT_TRUE(has_elements(first[i], params)) << "an empty group after a full one";
        ASSERT_GT(first[i - 1].params.front(), first[i].params.front());
      }
    }
    for (size_t i = 1; i < later.size(); ++i) {
      if (has_elements(later[i - 1], params)) {
        ASSERT_TRUE(has_elements(later[i], params)) << "an empty group after a full one";
        ASSERT_LT(place[index(later[i - 1].params.back())], place[index(later[i].params.back())]);
      }
    }
    if (HasFatalFailure()) return;
  }
}

TEST(BucketPlanner, AnswersEqualQuestionsEqually) {
  Random random(3);
  for (int round = 0; round < 1000; ++round) {
    const std::vector<ParamSpec> params = random.params();
    const std::vector<ParamSpec> copy = params;  // other addresses
    const BucketLimits limits = random.limits();
    const std::vector<ParamId> arrival = random.permutation(params.size());

    ASSERT_EQ(members(group_by_registration(params, limits)), members(group_by_registration(copy, limits)));
    ASSERT_EQ(members(group_by_arrival(params, arrival, limits)), members(group_by_arrival(copy, arrival, limits)));
  }
}

}  // namespace
}  // namespace lockstep
