// One number for the bits of a tensor, and what ranks say when theirs differ.
#include "comm/checksum.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "comm/agree.h"
#include "core/error.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_ranks;
using testing::ThreadCommunicator;

constexpr at::ScalarType kTypes[] = {at::kByte,         at::kChar,         at::kShort,         at::kInt,
                                     at::kLong,         at::kBool,         at::kHalf,          at::kFloat,
                                     at::kDouble,       at::kBFloat16,     at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                                     at::kComplexFloat, at::kComplexDouble};

/// The bytes of `numel` elements of a type: 0, 1, 2, ...
at::Tensor raw_bytes(int64_t numel, at::ScalarType type) {
  return at::arange(numel * static_cast<int64_t>(c10::elementSize(type)), at::dtype(at::kLong)).to(at::kByte);
}

at::Tensor bits(int64_t numel, at::ScalarType type) {
  const at::Tensor raw = raw_bytes(numel, type);
  return type == at::kBool ? raw.remainder(2).to(type) : raw.view(type);
}

TEST(Checksum, IsEqualForEqualBitsOfEveryType) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor tensor = bits(6, type);
    EXPECT_EQ(checksum(tensor), checksum(tensor.clone())) << c10::toString(type);
  }
}

TEST(Checksum, SeesEverySingleBitOfEveryType) {
  for (const at::ScalarType type : kTypes) {
    if (type == at::kBool) continue;
    const at::Tensor tensor = bits(3, type);
    std::set<int64_t> seen{checksum(tensor)};
    const auto size = 8 * 3 * c10::elementSize(type);
    for (size_t bit = 0; bit < size; ++bit) {
      const at::Tensor changed = tensor.clone();
      static_cast<uint8_t*>(changed.mutable_data_ptr())[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
      EXPECT_TRUE(seen.insert(checksum(changed)).second) << c10::toString(type) << ", bit " << bit;
    }
  }
  EXPECT_NE(checksum(at::zeros({2}, at::kBool)), checksum(at::tensor({0, 1}).to(at::kBool)));
}

TEST(Checksum, SeesTheOrderOfElements) {
  for (const at::ScalarType type : kTypes) {
    if (type == at::kBool) continue;
    const at::Tensor reversed = raw_bytes(4, type).view({4, -1}).flip(0).view(-1).view(type);
    EXPECT_NE(checksum(bits(4, type)), checksum(reversed)) << c10::toString(type);
  }
  const at::Tensor tensor = at::tensor({1.0, 2.0, 3.0, 4.0});
  const at::Tensor swapped = at::tensor({1.0, 3.0, 2.0, 4.0});
  EXPECT_NE(checksum(tensor), checksum(swapped));
  EXPECT_NE(checksum(at::tensor({1, 0}).to(at::kBool)), checksum(at::tensor({0, 1}).to(at::kBool)));
}

TEST(Checksum, SeesSignsThatChangeInPairs) {
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexDouble}) {
    const at::Tensor tensor = at::arange(1, 9, at::kDouble).to(type);
    at::Tensor changed = tensor.clone();
    changed.narrow(0, 2, 2).neg_();
    EXPECT_NE(checksum(tensor), checksum(changed)) << c10::toString(type);
    EXPECT_NE(checksum(tensor), checksum(-tensor)) << c10::toString(type);
  }
}

TEST(Checksum, SeesChangesThatBalanceUnderEvenWeights) {
  const auto sum = [](at::ArrayRef<int> values) { return checksum(at::tensor(values)); };
  EXPECT_NE(sum({1, 0, 0, 1}), sum({0, 1, 1, 0}));
  EXPECT_NE(sum({10, 10}), sum({13, 9}));
  EXPECT_NE(sum({5, 5, 5}), sum({6, 3, 6}));
  std::set<int64_t> seen;
  for (int mask = 0; mask < 4096; ++mask) {
    const at::Tensor places = at::arange(12, at::kInt);
    seen.insert(checksum(at::full({12}, mask, at::kInt).bitwise_right_shift(places).bitwise_and(1)));
  }
  EXPECT_EQ(seen.size(), 4096U) << "every mask of 12 places has a sum of its own";
}

TEST(Checksum, SeesShapeAndType) {
  const at::Tensor tensor = at::arange(6, at::kFloat);
  EXPECT_NE(checksum(tensor), checksum(tensor.view({2, 3})));
  EXPECT_NE(checksum(tensor.view({2, 3})), checksum(tensor.view({3, 2})));
  EXPECT_NE(checksum(tensor), checksum(tensor.view({1, 6})));
  EXPECT_NE(checksum(at::zeros({4}, at::kFloat)), checksum(at::zeros({4}, at::kInt)));
  EXPECT_NE(checksum(at::zeros({2}, at::kDouble)), checksum(at::zeros({2}, at::kLong)));
  EXPECT_NE(checksum(at::zeros({0})), checksum(at::zeros({1})));
  EXPECT_NE(checksum(at::zeros({0, 2})), checksum(at::zeros({2, 0})));
}

TEST(Checksum, DoesNotDependOnHowElementsLieInMemory) {
  const at::Tensor tensor = at::arange(24, at::kFloat).view({1, 2, 3, 4});
  EXPECT_EQ(checksum(tensor), checksum(tensor.contiguous(at::MemoryFormat::ChannelsLast)));
  const at::Tensor wide = at::zeros({4, 10});
  wide.narrow(1, 2, 3).copy_(at::arange(12).view({4, 3}));
  EXPECT_EQ(checksum(wide.narrow(1, 2, 3)), checksum(at::arange(12, at::kFloat).view({4, 3})));
  const at::Tensor complex = at::complex(at::tensor({1.0, 2.0}), at::tensor({3.0, -4.0}));
  EXPECT_EQ(checksum(complex.conj()), checksum(complex.conj().resolve_conj()));
  EXPECT_NE(checksum(complex.conj()), checksum(complex));
  EXPECT_EQ(checksum(tensor.to_sparse()), checksum(tensor));
}

TEST(Checksum, TellsNegativeZeroAndKindsOfNanApart) {
  EXPECT_NE(checksum(at::tensor({0.0})), checksum(at::tensor({-0.0})));
  const at::Tensor nan = at::full({1}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(checksum(nan), checksum(nan.clone())) << "equal bits, although not equal numbers";
}

TEST(Checksum, ReachesBeyondItsFirstPiece) {
  constexpr int64_t kNumel = (int64_t{1} << 20) + 3;
  const at::Tensor tensor = at::zeros({kNumel}, at::kByte);
  const int64_t before = checksum(tensor);
  std::set<int64_t> seen{before};
  for (const int64_t place : {int64_t{0}, (int64_t{1} << 20) - 1, int64_t{1} << 20, kNumel - 1}) {
    at::Tensor changed = tensor.clone();
    changed[place].fill_(1);
    EXPECT_TRUE(seen.insert(checksum(changed)).second) << place;
  }
}

TEST(Checksum, LeavesGraphAndGradientAlone) {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  EXPECT_EQ(checksum(leaf), checksum(at::ones({2})));
  EXPECT_FALSE(leaf.grad().defined());
}

// ---- over ranks ----

struct Named {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
};

Named model() {
  return {{at::ones({2, 2}), at::arange(3, at::kFloat), at::zeros({}, at::kLong)}, {"weight", "bias", "steps"}};
}

/// The error of every rank of `size`, where rank r sees what `change` has made of its model.
std::vector<std::string> compared(int size, const std::function<void(int, Named&)>& change) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  run_ranks(size, [&](std::shared_ptr<ThreadCommunicator> comm) {
    Named mine = model();
    change(comm->rank(), mine);
    try {
      verify_same_values(*comm, mine.tensors, mine.names);
    } catch (const Error& error) {
      errors[static_cast<size_t>(comm->rank())] = error.what();
    }
  });
  return errors;
}

TEST(SameValues, PassesWhenTheyAre) {
  for (const std::string& error : compared(3, [](int, Named&) {})) EXPECT_EQ(error, "");
}

TEST(SameValues, NamesTensorsAndRanksOnEveryRank) {
  const auto errors = compared(4, [](int rank, Named& mine) {
    if (rank == 1 || rank == 3) mine.tensors[1][2].fill_(7);
    if (rank == 3) mine.tensors[2].fill_(1);
  });
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_THAT(errors[rank], AllOf(HasSubstr(fmt::format("[rank {}]", rank)), HasSubstr("'bias' on rank 1, 3"),
                                    HasSubstr("'steps' on rank 3"), Not(HasSubstr("weight")), HasSubstr("[LS-026]")));
  }
}

TEST(SameValues, FindsTheOneRankInTheMiddle) {
  const auto errors = compared(3, [](int rank, Named& mine) {
    if (rank == 1) mine.tensors[0].fill_(2);
  });
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("'weight' on rank 1"));
}

TEST(SameValues, FindsElementsThatChangedPlaces) {
  const auto errors = compared(2, [](int rank, Named& mine) {
    if (rank == 1) mine.tensors[1] = mine.tensors[1].flip(0);
  });
  EXPECT_THAT(errors[0], HasSubstr("'bias' on rank 1"));
}

TEST(SameValues, FindsTensorsThatChangedPlaces) {
  const auto errors = compared(2, [](int rank, Named& mine) {
    mine.tensors[0] = at::zeros({3});
    if (rank == 1) std::swap(mine.tensors[0], mine.tensors[1]);
  });
  EXPECT_THAT(errors[1], AllOf(HasSubstr("'weight' on rank 1"), HasSubstr("'bias' on rank 1")));
}

TEST(SameValues, NamesNumbersThatDiffer) {
  const auto errors = compared(3, [](int rank, Named& mine) {
    if (rank == 2) mine.tensors.pop_back();
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("rank 0 has 3 parameters and buffers, rank 2 has 2"));
  }
}

TEST(SameValues, CountsWhatItDoesNotName) {
  const auto errors = compared(2, [](int rank, Named& mine) {
    mine = {};
    for (int i = 0; i < 13; ++i) {
      mine.tensors.push_back(at::full({1}, rank));
      mine.names.push_back(fmt::format("p{}", i));
    }
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("'p9' on rank 1"), Not(HasSubstr("'p10'")), HasSubstr("and 3 more")));
}

}  // namespace
}  // namespace lockstep
