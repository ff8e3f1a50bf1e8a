// How a world ends: which connections are shut down and which aborted, when, and what is said.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "nets.h"
#include "threads.h"

namespace lockstep {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::outcomes;

using Events = std::vector<std::string>;

/// Notes how it ends, as c10d's NCCL backend would see it.
class Recorder final : public c10d::Backend {
 public:
  Recorder(std::string name, Events& events, bool fails)
      : Backend(0, 1), name_(std::move(name)), events_(events), fails_(fails) {}
  [[nodiscard]] const std::string getBackendName() const override { return "recorder"; }
  void shutdown() override {
    events_.push_back(name_ + " shut down");
    if (fails_) throw std::runtime_error("a collective has failed");
  }
  void abort() override {
    events_.push_back(name_ + " aborted");
    if (fails_) throw std::runtime_error("and so has this");
  }

 private:
  std::string name_;
  Events& events_;
  bool fails_;
};

void record(const ProcessGroup& group, const std::string& name, Events& events, bool fails = false) {
  // On a type of device that nothing else here uses.
  group.c10d()->setBackend(at::kMeta, c10d::ProcessGroup::BackendType::CUSTOM,
                           c10::make_intrusive<Recorder>(name, events, fails));
}

/// Keeps the warnings of this thread.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

TEST(Endings, ConnectionsAreShutDownTheYoungestFirstWhenTheLastHandleGoes) {
  const GroupOptions options = testing::quick_options();
  const auto texts = outcomes(2, [&](int rank, const auto& store) {
    Events events;
    Warnings warnings;
    {
      ProcessGroup world = init_process_group({.rank = rank, .world_size = 2}, options, store);
      record(world, "world", events);
      DistributedDataParallel model(testing::filled(testing::Net()), world);
      {
        const ProcessGroup pair = world.new_group({1, 0});
        record(pair, "pair", events);
      }
      world = {};
      EXPECT_THAT(events, IsEmpty());  // the model is a handle too
    }
    EXPECT_THAT(events, ElementsAre("pair shut down", "world shut down"));
    EXPECT_THAT(warnings.texts, IsEmpty());
  });
  EXPECT_THAT(texts, Each(""));
}

TEST(Endings, ASubgroupKeepsItsWorldUp) {
  const GroupOptions options = testing::quick_options();
  const auto texts = outcomes(2, [&](int rank, const auto& store) {
    Events events;
    ProcessGroup pair;
    {
      const ProcessGroup world = init_process_group({.rank = rank, .world_size = 2}, options, store);
      record(world, "world", events);
      pair = world.new_group({0, 1});
    }
    EXPECT_THAT(events, IsEmpty());
    EXPECT_EQ(mean(pair, rank + 1.0), 1.5);
    pair = {};
    EXPECT_THAT(events, ElementsAre("world shut down"));
  });
  EXPECT_THAT(texts, Each(""));
}

TEST(Endings, AnExceptionAbortsConnectionsAndWaitsForNobody) {
  const GroupOptions options = testing::quick_options();
  std::vector<Events> events(2);
  std::promise<void> first_has_left;
  const auto texts = outcomes(2, [&](int rank, const auto& store) {
    try {
      const ProcessGroup world = init_process_group({.rank = rank, .world_size = 2}, options, store);
      record(world, "world", events.at(static_cast<size_t>(rank)));
      if (rank == 1) first_has_left.get_future().wait();
      throw std::runtime_error("on purpose");
    } catch (const std::runtime_error&) {
      if (rank == 0) first_has_left.set_value();
    }
    EXPECT_FALSE(store->check({"lockstep/end/0"}));  // it has told nobody, and so waited for nobody
  });
  EXPECT_THAT(texts, Each(""));
  EXPECT_THAT(events, Each(ElementsAre("world aborted")));
}

TEST(Endings, ARankThatDoesNotComeIsNamedAndConnectionsAreAborted) {
  const GroupOptions options = testing::quick_options().timeout(std::chrono::milliseconds(300));
  std::promise<void> first_has_left;
  const auto texts = outcomes(2, [&](int rank, const auto& store) {
    Events events;
    Warnings warnings;
    {
      const ProcessGroup world = init_process_group({.rank = rank, .world_size = 2}, options, store);
      record(world, "world", events);
      if (rank == 1) first_has_left.get_future().wait();
    }
    if (rank == 0) {
      first_has_left.set_value();
      EXPECT_THAT(events, ElementsAre("world aborted"));
      EXPECT_THAT(warnings.texts, Contains(HasSubstr("[rank 0] leaves without 1, which kept its process group 0.3 s")));
    } else {  // the other one has said that it came, so there is nothing to wait for
      EXPECT_THAT(events, ElementsAre("world shut down"));
      EXPECT_THAT(warnings.texts, IsEmpty());
    }
  });
  EXPECT_THAT(texts, Each(""));
}

TEST(Endings, ABackendThatCannotBeShutDownIsAbortedAndNothingEscapes) {
  Events events;
  {
    const ProcessGroup world = init_process_group({}, testing::quick_options(), c10::make_intrusive<c10d::HashStore>());
    record(world, "world", events, /*fails=*/true);
  }
  EXPECT_THAT(events, ElementsAre("world shut down", "world aborted"));
}

TEST(Endings, TwoWorldsAtOnceAndAfterEachOther) {
  for (int round = 0; round < 2; ++round) {
    const GroupOptions first_options = testing::quick_options(), second_options = testing::quick_options();
    const auto second_store = c10::make_intrusive<c10d::HashStore>();
    const auto texts = outcomes(2, [&](int rank, const auto& store) {
      const Launch launch{.rank = rank, .world_size = 2};
      const ProcessGroup first = init_process_group(launch, first_options, store);
      const ProcessGroup second = init_process_group(launch, second_options, second_store);
      DistributedDataParallel one(testing::filled(testing::Net()), first),
          other(testing::filled(testing::Net()), second);
      testing::loss_of(one(testing::batch_of(rank))).backward();
      testing::loss_of(other(testing::batch_of(rank))).backward();
      testing::expect_near(testing::gradients(one.parameters()), testing::gradients(other.parameters()), 0);
    });
    EXPECT_THAT(texts, Each(""));
  }
}

}  // namespace
}  // namespace lockstep
