// What ranks find out about each other before they trust a pass.
#include "reducer/guard.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "core/fingerprint.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Eq;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::run_ranks;
using testing::ThreadCommunicator;
using Findings = std::vector<Guard::Finding>;

/// What every rank finds when rank r sends `words[r]`.
Findings found(const std::vector<PassWord>& words) {
  Findings findings(words.size());
  run_ranks(static_cast<int>(words.size()), [&](std::shared_ptr<ThreadCommunicator> comm) {
    const auto rank = static_cast<size_t>(comm->rank());
    Guard guard;
    EXPECT_FALSE(guard.started());
    guard.start(*comm, words[rank], at::kCPU);
    EXPECT_TRUE(guard.started());
    findings[rank] = guard.finish(*comm, Reading::kNow);
    EXPECT_FALSE(guard.started());
  });
  return findings;
}

auto says(const std::string& words) { return Each(Field(&Guard::Finding::text, HasSubstr(words))); }
auto says_nothing() { return Each(Field(&Guard::Finding::text, IsEmpty())); }
auto sizes_may_differ(bool may) { return Each(Field(&Guard::Finding::sizes_may_differ, Eq(may))); }

PassWord word() {
  return {.forwards = 1, .pass = 41, .mode = 1011, .plan = fingerprint("p"), .hook = fingerprint("h")};
}

/// A word that differs in one field.
template <typename Member, typename Value>
PassWord with(Member member, Value value) {
  PassWord changed = word();
  changed.*member = value;
  return changed;
}

TEST(Guard, FindsNothingWhenAllRanksAgree) {
  EXPECT_THAT(found({word(), word(), word()}), says_nothing());
  EXPECT_THAT(found({word(), word()}), sizes_may_differ(false));
}

TEST(Guard, NamesForwardsWithBothNumbersAndRanksOnEveryRank) {
  const auto findings = found({word(), word(), with(&PassWord::forwards, 3), word()});
  EXPECT_THAT(findings, says("rank 2 has begun 3 forwards since the last reduction, but rank 3 only 1"));
  EXPECT_THAT(findings, sizes_may_differ(false));
  EXPECT_THAT(found({with(&PassWord::forwards, 0), word()}), says("rank 1 has begun 1 forwards"));
}

TEST(Guard, NamesTheNumberOfPasses) {
  const auto findings = found({word(), with(&PassWord::pass, 40), word()});
  EXPECT_THAT(findings, says("rank 2 has reduced 41 backward passes before this one, but rank 1 only 40"));
  EXPECT_THAT(findings, sizes_may_differ(false));
}

TEST(Guard, NamesTheModeWithoutItsNumber) {
  const auto findings = found({word(), with(&PassWord::mode, 11)});
  EXPECT_THAT(findings, says("ranks 0 and 1 reduce in different modes"));
  EXPECT_THAT(findings, Each(Field(&Guard::Finding::text, Not(HasSubstr("1011")))));
  EXPECT_THAT(findings, sizes_may_differ(true));
}

TEST(Guard, NamesThePlan) {
  const auto findings = found({word(), with(&PassWord::plan, fingerprint("q")), word()});
  EXPECT_THAT(findings, says("different bucket plans"));
  EXPECT_THAT(findings, says("1"));
  EXPECT_THAT(findings, sizes_may_differ(true));
}

TEST(Guard, NamesTheHook) {
  const auto findings = found({word(), with(&PassWord::hook, fingerprint("another"))});
  EXPECT_THAT(findings, says("different comm hooks"));
  EXPECT_THAT(findings, sizes_may_differ(true));
}

TEST(Guard, NamesTheRankWhoseBackwardThrew) {
  const auto findings = found({word(), word(), with(&PassWord::threw, 1)});
  EXPECT_THAT(findings, says("rank 2 swallowed an exception"));
  EXPECT_THAT(findings, sizes_may_differ(false)) << "the ranks are still in step";
}

TEST(Guard, NamesAllThatDiffers) {
  PassWord other = word();
  other.forwards = 2;
  other.hook = 5;
  EXPECT_THAT(found({word(), other}),
              AllOf(says("2 forwards"), says("; "), says("comm hooks"), sizes_may_differ(true)));
}

TEST(Guard, AWordThatSaysAnyAgreesWithAll) {
  PassWord any = word();
  any.forwards = PassWord::kAny;
  any.pass = PassWord::kAny;
  EXPECT_THAT(found({any, word(), word()}), says_nothing());
  EXPECT_THAT(found({any, any}), says_nothing());
  // But it does not hide a difference between the others.
  EXPECT_THAT(found({any, word(), with(&PassWord::pass, 7)}), says("rank 1 has reduced 41"));
}

TEST(Guard, KeepsLargeNumbersApart) {
  constexpr int64_t kLarge = int64_t{1} << 39;
  EXPECT_THAT(found({with(&PassWord::pass, kLarge), with(&PassWord::pass, kLarge - 1)}),
              says("rank 0 has reduced 549755813888 backward passes before this one, but rank 1 only 549755813887"));
  EXPECT_THAT(found({with(&PassWord::plan, ~uint64_t{0}), with(&PassWord::plan, ~uint64_t{0})}), says_nothing());
  EXPECT_THAT(found({with(&PassWord::plan, ~uint64_t{0}), with(&PassWord::plan, ~uint64_t{0} - 1)}), says("plans"));
}

TEST(Guard, KeepsNegativeNumbersApart) {
  EXPECT_THAT(found({with(&PassWord::forwards, -5), with(&PassWord::forwards, -7), with(&PassWord::forwards, -6)}),
              says("rank 0 has begun -5 forwards since the last reduction, but rank 1 only -7"));
}

TEST(Guard, NamesRanksOfLargeWorldsRightly) {
  std::vector<PassWord> words(20, word());
  words[17].pass = 3;
  EXPECT_THAT(found(words), says("but rank 17 only 3"));
  words[17].pass = 99;
  EXPECT_THAT(found(words), says("rank 17 has reduced 99"));
}

/// A group that knows sums only, as some written in Python for tests.
class SumsOnly final : public Communicator {
 public:
  explicit SumsOnly(std::shared_ptr<ThreadCommunicator> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return "sums"; }
  TransferPtr sum(at::Tensor data) override { return inner_->sum(std::move(data)); }
  TransferPtr max(at::Tensor data) override { return inner_->sum(std::move(data)); }
  TransferPtr broadcast(at::Tensor data, int root) override { return inner_->broadcast(std::move(data), root); }
  TransferPtr all_gather(at::Tensor out, at::Tensor in) override { return inner_->all_gather(out, in); }
  TransferPtr all_to_all(at::Tensor out, at::Tensor in) override { return inner_->all_to_all(out, in); }
  TransferPtr reduce_scatter(at::Tensor out, at::Tensor in) override { return inner_->reduce_scatter(out, in); }

 private:
  std::shared_ptr<ThreadCommunicator> inner_;
};

TEST(Guard, FindsNothingInAGroupThatCannotTakeAMaximum) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> inner) {
    SumsOnly comm(inner);
    Guard guard;
    guard.start(comm, with(&PassWord::pass, inner->rank() == 0 ? PassWord::kAny : 7), at::kCPU);
    EXPECT_THAT(guard.finish(comm, Reading::kNow).text, IsEmpty());
  });
}

TEST(Guard, StartsOnceInAPassAndForgetsOneThatWasNotFinished) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    Guard guard;
    guard.start(*comm, word(), at::kCPU);
    guard.start(*comm, with(&PassWord::pass, comm->rank()), at::kCPU);
    EXPECT_EQ(comm->num_calls(), 1);
    EXPECT_THAT(guard.finish(*comm, Reading::kNow).text, IsEmpty()) << "the first word counts";
    EXPECT_THAT(guard.finish(*comm, Reading::kNow).text, IsEmpty()) << "nothing is on its way";
    guard.start(*comm, word(), at::kCPU);
    guard.reset();
    EXPECT_FALSE(guard.started());
  });
}

TEST(Guard, ReadLaterSaysInTheNextPassWhatWasWrongInThisOne) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    Guard guard;
    guard.start(*comm, with(&PassWord::forwards, 1 + comm->rank()), at::kCPU);
    EXPECT_THAT(guard.finish(*comm, Reading::kLater).text, IsEmpty()) << "not looked at yet";
    guard.start(*comm, word(), at::kCPU);
    const Guard::Finding finding = guard.finish(*comm, Reading::kLater);
    EXPECT_THAT(finding.text, HasSubstr("rank 1 has begun 2 forwards"));
    EXPECT_TRUE(finding.is_late);
    guard.start(*comm, word(), at::kCPU);
    EXPECT_THAT(guard.finish(*comm, Reading::kLater).text, IsEmpty()) << "the pass in between was all right";
  });
}

TEST(Guard, ReadAtOnceLooksFirstAtWhatWasLeftUnread) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    Guard guard;
    guard.start(*comm, with(&PassWord::pass, comm->rank()), at::kCPU);
    EXPECT_THAT(guard.finish(*comm, Reading::kLater).text, IsEmpty());
    guard.start(*comm, word(), at::kCPU);
    EXPECT_TRUE(guard.finish(*comm, Reading::kNow).is_late);
  });
}

TEST(Guard, BringsTheWeightsOfAllRanks) {
  run_ranks(3, [](std::shared_ptr<ThreadCommunicator> comm) {
    Guard guard;
    for (const Reading reading : {Reading::kNow, Reading::kLater}) {
      guard.start(*comm, with(&PassWord::weight, 0.5 * comm->rank()), at::kCPU);
      EXPECT_THAT(guard.finish(*comm, reading).text, IsEmpty()) << "weights are not compared";
      EXPECT_TRUE(at::equal(guard.weights(), at::tensor({0.0, 0.5, 1.0}, at::kDouble)));
    }
  });
}

TEST(Guard, CostsNothingWhereThereIsOneRank) {
  run_ranks(1, [](std::shared_ptr<ThreadCommunicator> comm) {
    Guard guard;
    guard.start(*comm, word(), at::kCPU);
    EXPECT_FALSE(guard.started());
    EXPECT_EQ(comm->num_calls(), 0);
    EXPECT_THAT(guard.finish(*comm, Reading::kNow).text, IsEmpty());
  });
}

}  // namespace
}  // namespace lockstep
