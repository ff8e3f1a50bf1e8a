// Layout of buckets: offsets, padding, and what a plan refuses.
#include "core/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan_testing.h"

namespace lockstep {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr int64_t kHuge = int64_t{3} << 32;

std::vector<int64_t> offsets(const BucketPlan& plan) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < plan.num_params(); ++i) result.push_back(plan.slot(param_id(i)).offset);
  return result;
}

TEST(BucketPlan, StartsEverySlotAtAMultipleOf128Bytes) {
  const std::vector<ParamSpec> params{dense(1), dense(33), dense(5)};  // 4, 132 and 20 bytes

  const BucketPlan plan(params, {group({0, 1, 2})});

  EXPECT_THAT(offsets(plan), ElementsAre(0, 32, 96));
  EXPECT_EQ(plan.bucket(bucket_id(0)).numel, 101) << "nothing behind the last slot";
  EXPECT_EQ(plan.bucket(bucket_id(0)).payload_numel, 39);
}

TEST(BucketPlan, CountsTheAlignmentInElementsOfEachKind) {
  const std::vector<ParamSpec> params{dense(1, 0, 1), dense(1, 0, 1), dense(1, 1, 2),
                                      dense(1, 1, 2), dense(1, 2, 8), dense(1, 2, 8)};

  const BucketPlan plan(params, {group({0, 1}), group({2, 3}), group({4, 5})});

  EXPECT_THAT(offsets(plan), ElementsAre(0, 128, 0, 64, 0, 16));
}

TEST(BucketPlan, LeavesNoGapsWhenTheAlignmentIsOneByte) {
  const std::vector<ParamSpec> params{dense(1), dense(33), dense(5)};

  const BucketPlan plan(params, {group({0, 1, 2})}, /*alignment_bytes=*/1);

  EXPECT_THAT(offsets(plan), ElementsAre(0, 1, 34));
  EXPECT_EQ(plan.bucket(bucket_id(0)).numel, 39);
}

TEST(BucketPlan, KeepsTheAlignmentAlsoWhenTheElementSizeDoesNotDivideIt) {
  const std::vector<ParamSpec> params{dense(1, 0, 12), dense(1, 0, 12)};

  const BucketPlan plan(params, {group({0, 1})}, /*alignment_bytes=*/8);

  EXPECT_THAT(offsets(plan), ElementsAre(0, 2));  // 12 bytes would be no multiple of 8, 24 bytes are
}

TEST(BucketPlan, LaysMembersOutInTheOrderOfTheirGroup) {
  const std::vector<ParamSpec> params{dense(32), dense(32), dense(32)};

  const BucketPlan plan(params, {group({2, 0, 1})});

  EXPECT_THAT(offsets(plan), ElementsAre(32, 64, 0));
  EXPECT_THAT(numbers(plan.bucket(bucket_id(0)).params), ElementsAre(2, 0, 1));
}

TEST(BucketPlan, NumbersBucketsAsTheGroupsAreGivenAndKeepsTheirLimitAndKind) {
  const std::vector<ParamSpec> params{dense(1, 7), dense(1, 9)};

  const BucketPlan plan(params, {group({1}, 100), group({0}, 200)});

  EXPECT_EQ(plan.slot(param_id(1)).bucket, bucket_id(0));
  EXPECT_EQ(plan.slot(param_id(0)).bucket, bucket_id(1));
  EXPECT_EQ(plan.bucket(bucket_id(0)).kind, 9);
  EXPECT_EQ(plan.bucket(bucket_id(0)).limit_bytes, 100);
  EXPECT_EQ(plan.bucket(bucket_id(1)).limit_bytes, 200);
}

TEST(BucketPlan, GivesAParameterWithoutElementsASlotWithoutRoom) {
  const std::vector<ParamSpec> params{dense(32), dense(0), dense(32), dense(0)};

  const BucketPlan plan(params, {group({0, 1, 2}), group({3})});

  EXPECT_THAT(offsets(plan), ElementsAre(0, 32, 32, 0));
  EXPECT_EQ(plan.slot(param_id(1)).numel, 0);
  EXPECT_EQ(plan.bucket(bucket_id(0)).numel, 64);
  EXPECT_EQ(plan.bucket(bucket_id(1)).numel, 0);
}

TEST(BucketPlan, GivesASparseParameterABucketWithoutMemory) {
  const std::vector<ParamSpec> params{sparse(1000)};

  const BucketPlan plan(params, {group({0}, 0)});

  const Bucket& bucket = plan.bucket(bucket_id(0));
  EXPECT_TRUE(bucket.sparse);
  EXPECT_EQ(bucket.numel, 0);
  EXPECT_EQ(bucket.payload_numel, 1000);
  EXPECT_EQ(plan.slot(param_id(0)).offset, 0);
  EXPECT_EQ(plan.slot(param_id(0)).numel, 1000);
}

TEST(BucketPlan, CountsBeyond32Bits) {
  const std::vector<ParamSpec> params{dense(kHuge), dense(kHuge)};

  const BucketPlan plan(params, {group({0, 1})});

  EXPECT_EQ(plan.slot(param_id(1)).offset, kHuge);
  EXPECT_EQ(plan.bucket(bucket_id(0)).numel, 2 * kHuge);
}

TEST(BucketPlan, IsEmptyForNoParameters) {
  const BucketPlan plan({}, {});

  EXPECT_EQ(plan.num_params(), 0U);
  EXPECT_THAT(plan.buckets(), IsEmpty());
}

struct Refusal {
  std::string name;
  std::vector<ParamSpec> params;
  std::vector<BucketGroup> groups;
  std::string text;
  int64_t alignment_bytes = kSlotAlignmentBytes;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class RefusedPlan : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusedPlan, NamesTheParameterAndTheRule) {
  const Refusal& refusal = GetParam();
  EXPECT_THAT(([&] { BucketPlan(refusal.params, refusal.groups, refusal.alignment_bytes); }),
              ThrowsMessage<std::invalid_argument>(HasSubstr(refusal.text)));
}

INSTANTIATE_TEST_SUITE_P(
    BucketPlan, RefusedPlan,
    ::testing::Values(
        Refusal{"left_out", {dense(1), dense(1)}, {group({0})}, "parameter 1 is in no bucket"},
        Refusal{"twice", {dense(1), dense(1)}, {group({0, 1}), group({0})}, "parameter 0 is in bucket 0 and again in"},
        Refusal{"twice_in_one", {dense(1)}, {group({0, 0})}, "parameter 0 is in bucket 0 and again in bucket 0"},
        Refusal{"unknown", {dense(1)}, {group({0, 5})}, "bucket 0 names parameter 5, but there are only 1"},
        Refusal{"empty_group", {dense(1)}, {group({0}), group({})}, "bucket 1 has no parameter"},
        Refusal{"mixed_kinds", {dense(1, 3), dense(1, 4)}, {group({0, 1})}, "parameter 1 is of kind 4, but bucket 0"},
        Refusal{"mixed_sizes", {dense(1, 0, 4), dense(1, 0, 2)}, {group({0, 1})}, "parameter 1 has elements of 2 byt"},
        Refusal{"sparse_second", {dense(1), sparse(1)}, {group({0, 1})}, "parameter 1 has sparse gradients and must"},
        Refusal{"sparse_first", {sparse(1), dense(1)}, {group({0, 1})}, "parameter 0 has sparse gradients and must"},
        Refusal{"negative", {dense(-1)}, {group({0})}, "parameter 0 has -1 elements"},
        Refusal{"no_size", {dense(1, 0, 0)}, {group({0})}, "parameter 0 has elements of 0 bytes"},
        Refusal{"overflow", {dense(kUnlimited / 5), dense(kUnlimited / 5)}, {group({0, 1})}, "parameter 1 makes buck"},
        Refusal{"alignment", {dense(1)}, {group({0})}, "alignment_bytes is 0", 0}),
    [](const auto& test) { return test.param.name; });

TEST(BucketPlan, CoversEveryBucketWithSlotsThatAreAlignedAndApart) {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    const std::vector<ParamSpec> params = random.params();
    const int64_t alignment = int64_t{1} << random.below(9);
    const BucketPlan plan(params, group_by_arrival(params, random.permutation(params.size()), random.limits()),
                          alignment);

    std::vector<int> seen(params.size(), 0);
    for (size_t b = 0; b < plan.num_buckets(); ++b) {
      const Bucket& bucket = plan.bucket(bucket_id(b));
      int64_t end = 0;
      int64_t payload = 0;
      for (const ParamId id : bucket.params) {
        const Slot& slot = plan.slot(id);
        const ParamSpec& spec = params[index(id)];
        ++seen[index(id)];
        ASSERT_EQ(slot.bucket, bucket_id(b));
        ASSERT_EQ(slot.numel, spec.numel);
        ASSERT_EQ(spec.kind, bucket.kind);
        ASSERT_EQ(spec.sparse, bucket.sparse);
        ASSERT_EQ(slot.offset * spec.element_size % alignment, 0);
        ASSERT_GE(slot.offset, end) << "overlaps the slot before";
        ASSERT_LT((slot.offset - end) * spec.element_size, alignment) << "more padding than needed";
        end = slot.offset + slot.numel;
        payload += slot.numel;
      }
      ASSERT_EQ(bucket.payload_numel, payload);
      if (bucket.sparse) {
        ASSERT_EQ(bucket.numel, 0);
      } else {
        ASSERT_EQ(bucket.numel, end) << "as long as its slots, no longer";
      }
    }
    ASSERT_THAT(seen, Each(1)) << "not every parameter is in exactly one slot";
  }
}

}  // namespace
}  // namespace lockstep
