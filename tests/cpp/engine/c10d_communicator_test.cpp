// Waiting for a collective of a process group for a while, when it ends at the worst moment.
#include "comm/c10d_communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr milliseconds kPatience{20};

/// Answers its first `num_timeouts` waits as torch does when the time is over. It ends right after the last of them.
class LateWork final : public c10d::Work {
 public:
  LateWork(int num_timeouts, std::string error)
      : Work(0, c10d::OpType::BROADCAST), timeouts_left_(num_timeouts), error_(std::move(error)) {}

  bool wait(milliseconds timeout) override {
    if (timeouts_left_ == 0) return Work::wait(timeout);
    std::this_thread::sleep_for(timeout + milliseconds(1));
    if (--timeouts_left_ == 0) end();
    TORCH_CHECK(false, "Operation timed out!");
  }
  void end() { finish(error_.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(error_))); }

 private:
  int timeouts_left_;
  std::string error_;
};

class LateBackend final : public c10d::Backend {
 public:
  explicit LateBackend(c10::intrusive_ptr<c10d::Work> work) : Backend(0, 2), work_(std::move(work)) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::BroadcastOptions& /*options*/) override {
    return work_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

TransferPtr transfer(const c10::intrusive_ptr<LateWork>& work) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<LateBackend>(work));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return C10dCommunicator(group).broadcast(at::ones({1}), 0);
}

TransferPtr late(int num_timeouts, std::string error = "") {
  return transfer(c10::make_intrusive<LateWork>(num_timeouts, std::move(error)));
}

TEST(C10dTransfer, GivesUpAsOftenAsPatienceEndsAndThenSucceeds) {
  const TransferPtr transfer = late(3);
  EXPECT_FALSE(transfer->wait_for(kPatience));
  EXPECT_FALSE(transfer->wait_for(kPatience));
  EXPECT_TRUE(transfer->wait_for(kPatience));
}

TEST(C10dTransfer, ACollectiveThatEndsWithOurPatienceHasNotTimedOut) { EXPECT_TRUE(late(1)->wait_for(kPatience)); }

TEST(C10dTransfer, OneThatFailsAsPatienceEndsGivesItsOwnError) {
  EXPECT_THAT([] { (void)late(1, "a broken cable")->wait_for(kPatience); },
              ThrowsMessage<std::runtime_error>(HasSubstr("a broken cable")));
}

TEST(C10dTransfer, AFailureNeedsNoPatience) {
  const auto work = c10::make_intrusive<LateWork>(0, "a broken cable");
  const TransferPtr broken = transfer(work);
  work->end();
  EXPECT_THAT([&] { (void)broken->wait_for(kPatience); },
              ThrowsMessage<std::runtime_error>(HasSubstr("a broken cable")));
}

}  // namespace
}  // namespace lockstep
