// The hook that docs/hooks.md explains does what it says there.
#include "top_k_hook.h"

#include <gtest/gtest.h>

#include "reducer/reducer.h"
#include "thread_world.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::ThreadCommunicator;

TEST(TopKHook, SendsTheLargestNowAndTheRestLater) {
  run_ranks(2, [](std::shared_ptr<ThreadCommunicator> comm) {
    const at::Tensor param = at::zeros({4}).set_requires_grad(true);
    auto reducer = Reducer::create({{param}, {"param"}, {false}}, comm, {}, std::make_unique<TopK>(1.0 / 32));
    const auto reduced = [&](const at::Tensor& grad) {
      param.mutable_grad() = grad.clone();
      reducer->sync_gradients();
      return param.grad().clone();
    };
    // One element per rank of a bucket of 4 (and 28 of padding): 8 of rank 0, -6 of rank 1; both halved.
    const at::Tensor grad = comm->rank() == 0 ? at::tensor({8.F, 2.F, 0.F, 0.F}) : at::tensor({0.F, 4.F, -6.F, 0.F});
    EXPECT_TRUE(reduced(grad).equal(at::tensor({4.F, 0.F, -3.F, 0.F})));
    reducer->reset(comm);  // another plan: what was left out is remembered by name
    EXPECT_TRUE(reduced(at::zeros({4})).equal(at::tensor({0.F, 3.F, 0.F, 0.F})));
  });
}

}  // namespace
}  // namespace lockstep
