// Bucket memory: where gradients go in, where they come out, and what stays untouched.
#include "buckets/grad_buffers.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/bucket_planner.h"
#include "core/error.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Presence = GradBuffers::Presence;

constexpr BucketId kFirst{0};

ParamList list_of(std::vector<at::Tensor> tensors) {
  ParamList params;
  for (at::Tensor& tensor : tensors) {
    params.names.push_back(fmt::format("p{}", params.tensors.size()));
    params.tensors.push_back(tensor.set_requires_grad(true));
    params.sparse.push_back(false);
  }
  return params;
}

BucketPlan one_bucket_per_kind(const ParamList& params, int64_t alignment = kSlotAlignmentBytes) {
  const auto specs = specs_of(params);
  return BucketPlan(specs, group_by_registration(specs, {INT64_MAX}), alignment);
}

at::Tensor counting(at::IntArrayRef sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return at::arange(1, numel + 1, at::dtype(at::kFloat)).view(sizes);
}

TEST(SpecsOf, GivesAKindToEveryDtypeAndCountsComplexNumbersTwice) {
  const ParamList params =
      list_of({at::zeros({3}), at::zeros({2}, at::kComplexFloat), at::zeros({3}, at::kHalf), at::zeros({5})});
  std::vector<int> kinds;
  std::vector<int64_t> numels;
  for (const ParamSpec& spec : specs_of(params)) {
    kinds.push_back(spec.kind);
    numels.push_back(spec.numel);
  }
  EXPECT_THAT(kinds, ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(numels, ElementsAre(3, 4, 3, 5));
}

TEST(GradBuffers, AbsorbsScaledGradientsWithZerosForAbsentOnesAndInTheGaps) {
  ParamList params = list_of({at::zeros({2}), at::zeros({3})});
  GradBuffers buffers(params, GradPlacement::kOwnMemory, BucketLifetime::kTraining, one_bucket_per_kind(params));
  params.tensors[0].mutable_grad() = counting({2});
  buffers.memory(kFirst).narrow(0, 32, 3).fill_(9);  // what an earlier step left
  buffers.absorb(kFirst, 0.5, nullptr);
  at::Tensor expected = at::zeros({32 + 3});
  expected[0] = 0.5;
  expected[1] = 1.0;
  EXPECT_TRUE(buffers.memory(kFirst).equal(expected));
  EXPECT_TRUE(params.tensors[0].grad().equal(counting({2}))) << "the gradient itself is not touched";
}

TEST(GradBuffers, GradientsInAnotherMemoryOrderArriveInTheOrderOfTheirParameter) {
  ParamList params = list_of({at::zeros({2, 3})});
  GradBuffers buffers(params, GradPlacement::kOwnMemory, BucketLifetime::kTraining, one_bucket_per_kind(params, 1));
  const at::Tensor transposed = counting({3, 2}).t();
  params.tensors[0].mutable_grad() = transposed;
  buffers.absorb(kFirst, 2.0, nullptr);
  EXPECT_TRUE(buffers.memory(kFirst).view({2, 3}).equal(transposed * 2.0));
  buffers.publish(kFirst, at::arange(6, at::dtype(at::kFloat)), nullptr);
  EXPECT_TRUE(params.tensors[0].grad().equal(at::arange(6, at::dtype(at::kFloat)).view({2, 3})));
  EXPECT_EQ(params.tensors[0].grad().stride(0), 1) << "the gradient keeps its strides";
}

TEST(GradBuffers, AChannelsLastParameterIsOneStraightCopy) {
  ParamList params = list_of({at::zeros({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast)});
  GradBuffers buffers(params, GradPlacement::kOwnMemory, BucketLifetime::kTraining, one_bucket_per_kind(params, 1));
  const at::Tensor grad = counting({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  params.tensors[0].mutable_grad() = grad.clone();
  buffers.absorb(kFirst, 1.0, nullptr);
  EXPECT_TRUE(buffers.slot_view(buffers.memory(kFirst), param_id(0)).equal(grad));
  EXPECT_TRUE(buffers.memory(kFirst).equal(grad.permute({0, 2, 3, 1}).reshape(-1)));
}

TEST(GradBuffers, ComplexGradientsLieInTheBucketAsPairs) {
  ParamList params = list_of({at::zeros({2}, at::kComplexFloat)});
  GradBuffers buffers(params, GradPlacement::kBucketView, BucketLifetime::kTraining, one_bucket_per_kind(params, 1));
  params.tensors[0].mutable_grad() = at::complex(counting({2}), -counting({2}));
  buffers.absorb(kFirst, 1.0, nullptr);
  EXPECT_TRUE(buffers.memory(kFirst).equal(at::tensor({1.f, -1.f, 2.f, -2.f})));
  EXPECT_THAT(buffers.lend(kFirst).members().sizes, ElementsAre(ElementsAre(2, 2)));
  buffers.publish(kFirst, buffers.memory(kFirst).mul_(2), nullptr);
  EXPECT_TRUE(params.tensors[0].grad().equal(at::complex(counting({2}), -counting({2})) * 2));
}

TEST(GradBuffers, ViewsLiveInTheBucketAndAreNoAutogradViews) {
  ParamList params = list_of({at::zeros({2, 2})});
  GradBuffers buffers(params, GradPlacement::kBucketView, BucketLifetime::kTraining, one_bucket_per_kind(params));
  params.tensors[0].mutable_grad() = counting({2, 2});
  buffers.absorb(kFirst, 1.0, nullptr);
  const at::Tensor grad = params.tensors[0].grad();
  EXPECT_TRUE(grad.is_alias_of(buffers.memory(kFirst)));
  EXPECT_FALSE(grad.is_view());
  EXPECT_NO_THROW(grad.detach_());
  // An answer in other memory ends up in the bucket: one truth.
  buffers.publish(kFirst, at::full({4}, 5.f), nullptr);
  EXPECT_TRUE(params.tensors[0].grad().equal(at::full({2, 2}, 5.f)));
  EXPECT_TRUE(params.tensors[0].grad().is_same(grad));
}

TEST(GradBuffers, ANewPlanMovesViewsWithWhatTheyHold) {
  ParamList params = list_of({at::zeros({2}), at::zeros({3})});
  const auto specs = specs_of(params);
  GradBuffers buffers(params, GradPlacement::kBucketView, BucketLifetime::kTraining, one_bucket_per_kind(params));
  params.tensors[0].mutable_grad() = counting({2});
  params.tensors[1].mutable_grad() = counting({3});
  buffers.absorb(kFirst, 1.0, nullptr);
  const at::Tensor by_hand = at::full({3}, 8.f);
  params.tensors[1].mutable_grad() = by_hand;  // replaced by the user just before
  buffers.adopt(BucketPlan(specs, group_by_arrival(specs, std::vector<ParamId>{param_id(1), param_id(0)}, {1})));
  EXPECT_TRUE(params.tensors[0].grad().equal(counting({2})));
  EXPECT_TRUE(params.tensors[0].grad().is_alias_of(buffers.memory(bucket_id(1))));
  EXPECT_TRUE(params.tensors[1].grad().is_same(by_hand));
}

TEST(GradBuffers, PresenceDecidesWhatIsSentAndWhereTheGradientStays) {
  ParamList params = list_of({at::zeros({1}), at::zeros({1}), at::zeros({1})});
  GradBuffers buffers(params, GradPlacement::kBucketView, BucketLifetime::kTraining, one_bucket_per_kind(params, 1));
  for (at::Tensor& param : params.tensors) param.mutable_grad() = at::ones({1});
  buffers.absorb(kFirst, 1.0, nullptr);
  const std::vector<Presence> presence{Presence::kInside, Presence::kOutside, Presence::kAbsent};
  buffers.absorb(kFirst, 1.0, [&](ParamId id) { return presence[index(id)]; });
  EXPECT_TRUE(buffers.memory(kFirst).equal(at::tensor({1.f, 1.f, 0.f})));
  buffers.memory(kFirst).fill_(7);  // the reduction
  EXPECT_EQ(params.tensors[0].grad().item<float>(), 7);
  EXPECT_EQ(params.tensors[1].grad().item<float>(), 1);
  buffers.publish(kFirst, buffers.memory(kFirst), [](ParamId id) { return index(id) == 1; });
  EXPECT_EQ(params.tensors[1].grad().item<float>(), 1) << "kept";
  EXPECT_EQ(params.tensors[2].grad().item<float>(), 7);
}

TEST(GradBuffers, PublishTellsAutogradThatTheGradientChanged) {
  ParamList params = list_of({at::zeros({2})});
  GradBuffers buffers(params, GradPlacement::kOwnMemory, BucketLifetime::kTraining, one_bucket_per_kind(params));
  params.tensors[0].mutable_grad() = counting({2});
  const auto before = params.tensors[0].grad()._version();
  buffers.publish(kFirst, at::zeros({32}), nullptr);
  EXPECT_GT(params.tensors[0].grad()._version(), before);
}

TEST(GradBuffers, AGradientThatDoesNotFitItsParameterIsNamed) {
  ParamList params = list_of({at::zeros({2})});
  GradBuffers buffers(params, GradPlacement::kOwnMemory, BucketLifetime::kTraining, one_bucket_per_kind(params));
  for (const at::Tensor& wrong : {at::zeros({2}, at::kDouble), at::zeros({3}), at::zeros({2}).to_sparse()}) {
    params.tensors[0].mutable_grad() = wrong;
    try {
      buffers.absorb(kFirst, 1.0, nullptr);
      ADD_FAILURE() << "accepted " << wrong.toString();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("the gradient of 'p0' (#0)"));
    }
  }
}

TEST(GradBuffers, SparseGradientsAreLentAsTheyAreAndAbsentOnesAsEmpty) {
  ParamList params = list_of({at::zeros({4, 2})});
  params.sparse[0] = true;
  GradBuffers buffers(params, GradPlacement::kBucketView, BucketLifetime::kTraining, one_bucket_per_kind(params));
  buffers.absorb(kFirst, 0.5, nullptr);
  EXPECT_EQ(buffers.memory(kFirst)._nnz(), 0);
  const at::Tensor indices = at::tensor({1, 3}, at::kLong).view({1, 2});
  params.tensors[0].mutable_grad() = at::sparse_coo_tensor(indices, at::ones({2, 2}), {4, 2});
  buffers.absorb(kFirst, 0.5, nullptr);
  EXPECT_TRUE(buffers.memory(kFirst).to_dense()[3].equal(at::full({2}, 0.5)));
}

}  // namespace
}  // namespace lockstep
