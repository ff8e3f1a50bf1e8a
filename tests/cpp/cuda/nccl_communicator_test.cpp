// Ranks as threads, a GPU each. Skipped where there are too few; the first tests need one or none.
#include "comm/nccl_communicator.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <exception>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "core/error.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

c10::intrusive_ptr<c10d::Store> make_store() { return c10::make_intrusive<c10d::HashStore>(); }

/// Runs `body(rank, store)` in a thread per rank, on a GPU of its own, and rethrows the first exception.
void run_gpus(int size, const std::function<void(int, const c10::intrusive_ptr<c10d::Store>&)>& body) {
  const auto store = make_store();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        c10::cuda::set_device(static_cast<c10::DeviceIndex>(rank));
        body(rank, store);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// The same for two ranks that have a communicator.
void run_pair(const std::function<void(Communicator&)>& body, const NcclOptions& options = {.timeout = 60s}) {
  run_gpus(2, [&](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    const auto comm = make_nccl_communicator(store, rank, 2, options);
    body(*comm);
  });
}

at::TensorOptions on_gpu(at::ScalarType dtype) {
  return at::dtype(dtype).device(at::Device(at::kCUDA, c10::cuda::current_device()));
}

at::Tensor row(std::initializer_list<double> values, at::ScalarType dtype = at::kFloat) {
  return at::tensor(at::ArrayRef<double>(values)).to(on_gpu(dtype));
}

/// Keeps the current stream busy for a while: 20 to 200 ms on the GPUs of these years.
void keep_busy() {
  at::Tensor a = at::ones({8192, 8192}, on_gpu(at::kFloat));
  for (int i = 0; i < 8; ++i) a = a.mm(a).clamp(-1, 1);
}

bool is_busy() {
  const cudaError_t status = cudaStreamQuery(c10::cuda::getCurrentCUDAStream());
  return status == cudaErrorNotReady;
}

/// Sums what a busy stream is still to write, and reads the sum, without a moment's wait on the host.
void expect_order_without_waiting(Communicator& comm) {
  at::Tensor data = at::zeros({1 << 22}, on_gpu(at::kFloat));
  for (const bool warm : {false, true}) {  // the first round connects and loads kernels, which waits
    keep_busy();
    data.fill_(comm.rank() + 1);
    comm.sum(data)->wait();
    EXPECT_TRUE(!warm || is_busy()) << "a collective has waited";
    const at::Tensor after = data * 2;
    EXPECT_TRUE(!warm || is_busy()) << "reading the sum has waited";
    EXPECT_TRUE(after.eq(comm.size() * (comm.size() + 1)).all().item<bool>());
    c10::cuda::device_synchronize();
  }
}

template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

TEST(NcclWithoutGpu, SaysWhatIsMissing) {
  if (c10::cuda::device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(error_of([] { (void)make_nccl_communicator(make_store(), 0, 1); }),
              AllOf(HasSubstr("[rank 0]"), HasSubstr("needs a GPU")));
}

class NcclAlone : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 1) GTEST_SKIP() << "needs a GPU";
    c10::cuda::set_device(0);
  }
};

TEST_F(NcclAlone, AWorldOfOneIsTheIdentity) {
  const auto comm = make_nccl_communicator(make_store(), 0, 1, {.timeout = 60s});
  EXPECT_EQ(comm->name(), "nccl");
  at::Tensor data = row({1, 2});
  comm->sum(data)->wait();
  comm->max(data)->wait();
  comm->average(data)->wait();
  comm->broadcast(data, 0)->wait();
  EXPECT_TRUE(data.equal(row({1, 2})));
  for (const auto call : {&Communicator::all_gather, &Communicator::all_to_all, &Communicator::reduce_scatter}) {
    at::Tensor output = row({0, 0});
    (*comm.*call)(output, data)->wait();
    EXPECT_TRUE(output.equal(data));
  }
}

TEST_F(NcclAlone, StreamsOrderEverythingAndTheHostWaitsForNothing) {
  expect_order_without_waiting(*make_nccl_communicator(make_store(), 0, 1, {.timeout = 60s}));
}

TEST_F(NcclAlone, ARankThatNeverJoinsIsNamedWithinTheTimeout) {
  const auto start = Clock::now();
  EXPECT_THAT(error_of([] { (void)make_nccl_communicator(make_store(), 0, 2, {.timeout = 2s}); }),
              AllOf(HasSubstr("[rank 0]"), HasSubstr("rank 1 is missing"), HasSubstr("2.0 s")));
  EXPECT_LT(seconds_since(start), 8);
}

TEST_F(NcclAlone, ARankZeroThatNeverComesIsNamedWithinTheTimeout) {
  const auto start = Clock::now();
  EXPECT_THAT(error_of([] { (void)make_nccl_communicator(make_store(), 1, 2, {.timeout = 1s}); }),
              AllOf(HasSubstr("[rank 1]"), HasSubstr("rank 0 has not sent")));
  EXPECT_LT(seconds_since(start), 5);
}

TEST_F(NcclAlone, WhatItCannotMoveIsRefusedInWords) {
  const auto comm = make_nccl_communicator(make_store(), 0, 1, {.timeout = 60s});
  EXPECT_THAT(error_of([&] { (void)comm->sum(at::ones({2, 3})); }), AllOf(HasSubstr("2x3"), HasSubstr("on cpu")));
  EXPECT_THAT(error_of([&] { (void)comm->sum(row({1, 2, 3, 4}).slice(0, 0, 4, 2)); }), HasSubstr("gaps"));
  EXPECT_THAT(error_of([&] { (void)comm->sum(row({1}).to_sparse()); }), HasSubstr("sparse"));
  EXPECT_THAT(error_of([&] { (void)comm->sum(row({1}, at::kShort)); }), HasSubstr("Short"));
  EXPECT_THAT(error_of([&] { (void)comm->max(row({1}, at::kComplexFloat)); }), HasSubstr("ComplexFloat"));
  EXPECT_THAT(error_of([&] { (void)comm->all_gather(row({1, 2}), row({1})); }), HasSubstr("2 elements"));
  EXPECT_THAT(error_of([&] { (void)comm->broadcast(row({1}), 1); }), HasSubstr("rank 1"));
}

TEST_F(NcclAlone, CanBeCapturedIntoAGraph) {
  const auto comm = make_nccl_communicator(make_store(), 0, 1, {.timeout = 60s});
  at::Tensor data = row({1, 2});
  comm->sum(data)->wait();
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  comm->sum(data)->wait();
  std::this_thread::sleep_for(500ms);  // the watchdog has looked meanwhile
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  comm->sum(data)->wait();
  EXPECT_TRUE(data.equal(row({1, 2})));
}

TEST_F(NcclAlone, TransfersOutliveTheirCommunicator) {
  auto comm = make_nccl_communicator(make_store(), 0, 1, {.timeout = 60s});
  at::Tensor data = row({3});
  TransferPtr kept = comm->sum(data);
  TransferPtr dropped = comm->sum(data);
  comm.reset();
  dropped.reset();
  kept->wait();
  EXPECT_TRUE(data.equal(row({3})));
}

class NcclPair : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  }
};

TEST_F(NcclPair, SumsEveryDtype) {
  run_pair([](Communicator& comm) {
    const double mine = comm.rank() + 1;
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                                       at::kByte, at::kChar, at::kComplexFloat, at::kComplexDouble}) {
      at::Tensor data = row({mine, 10 * mine, 0}, dtype);
      comm.sum(data)->wait();
      EXPECT_TRUE(data.equal(row({3, 30, 0}, dtype))) << c10::toString(dtype);
    }
    at::Tensor truth = row({mine - 1, 1, 0}, at::kBool);
    comm.sum(truth)->wait();
    EXPECT_TRUE(truth.equal(row({1, 1, 0}, at::kBool)));
    at::Tensor imaginary = at::complex(row({mine}), row({-mine}));
    comm.sum(imaginary)->wait();
    EXPECT_TRUE(imaginary.equal(at::complex(row({3}), row({-3}))));
  });
}

TEST_F(NcclPair, KeepsTheContractOfTheInterface) {
  run_pair([](Communicator& comm) {
    const double mine = comm.rank() + 1;
    at::Tensor data = row({mine, -mine});
    comm.max(data)->wait();
    EXPECT_TRUE(data.equal(row({2, -1})));
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      data = row({mine, 4 * mine}, dtype);
      comm.average(data)->wait();
      EXPECT_TRUE(data.equal(row({1.5, 6}, dtype)));
    }
    data = row({mine}, at::kShort);  // what is only moved may be of any dtype
    comm.broadcast(data, 1)->wait();
    EXPECT_TRUE(data.equal(row({2}, at::kShort)));
    at::Tensor output = row({0, 0});
    comm.all_gather(output, row({mine}))->wait();
    EXPECT_TRUE(output.equal(row({1, 2})));
    comm.all_to_all(output, row({mine, 10 * mine}))->wait();
    const double place = comm.rank() == 0 ? 1 : 10;
    EXPECT_TRUE(output.equal(row({place, 2 * place})));
    at::Tensor part = row({0});
    comm.reduce_scatter(part, row({mine, 10 * mine}))->wait();
    EXPECT_TRUE(part.equal(row({3 * place})));
  });
}

TEST_F(NcclPair, SumsManyTensorsInOneTransfer) {
  run_pair([](Communicator& comm) {
    const double mine = comm.rank() + 1;
    std::vector<at::Tensor> tensors{
        at::full({1000, 1000}, mine, on_gpu(at::kFloat)), at::empty({0}, on_gpu(at::kFloat)),
        at::full({3}, mine, on_gpu(at::kBFloat16)),
        at::full({2, 3, 4, 5}, mine, on_gpu(at::kDouble)).to(at::MemoryFormat::ChannelsLast)};
    comm.sum_all(tensors)->wait();
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(tensor.eq(3).all().item<bool>());
    comm.sum_all({})->wait();
  });
}

TEST_F(NcclPair, StreamsOrderEverythingAndTheHostWaitsForNothing) {
  run_pair([](Communicator& comm) { expect_order_without_waiting(comm); });
}

TEST_F(NcclPair, ADroppedTransferFinishesAndKeepsItsMemory) {
  run_pair([](Communicator& comm) {
    at::Tensor kept = at::zeros({1 << 22}, on_gpu(at::kFloat));
    comm.sum(kept)->wait();
    keep_busy();
    kept.fill_(comm.rank() + 1);
    (void)comm.sum(kept);
    at::Tensor lost = at::full({3 << 20}, comm.rank() + 1, on_gpu(at::kFloat));
    const void* place = lost.const_data_ptr();
    (void)comm.sum(lost);
    lost = at::Tensor();
    const at::Tensor next = at::full({3 << 20}, 9, on_gpu(at::kFloat));
    EXPECT_TRUE(is_busy()) << "too fast to mean anything";
    EXPECT_NE(next.const_data_ptr(), place) << "the memory of a collective on its way was given to somebody else";
    c10::cuda::device_synchronize();
    EXPECT_TRUE(kept.eq(3).all().item<bool>());
    EXPECT_TRUE(next.eq(9).all().item<bool>());
  });
}

TEST_F(NcclPair, OptionsAreTaken) {
  run_pair(
      [](Communicator& comm) {
        at::Tensor data = at::ones({1 << 20}, on_gpu(at::kFloat));
        comm.sum(data)->wait();
        EXPECT_TRUE(data.eq(2).all().item<bool>());
      },
      {.timeout = 60s, .max_ctas = 2, .net_name = {}, .split_share = true});
}

TEST_F(NcclPair, ARankThatStopsCallingIsReportedAndTornDownInTime) {
  std::barrier<> reported(2);
  const auto start = Clock::now();
  run_gpus(2, [&](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    auto comm = make_nccl_communicator(store, rank, 2, {.timeout = 4s});
    at::Tensor data = at::ones({1 << 20}, on_gpu(at::kFloat));
    comm->sum(data)->wait();
    c10::cuda::device_synchronize();
    if (rank == 0) {
      comm->sum(data)->wait();  // rank 1 never calls it
      std::string report = "no error";
      while (report == "no error" && seconds_since(start) < 60) {
        std::this_thread::sleep_for(100ms);
        report = error_of([&] { comm->max(data)->wait(); });
      }
      EXPECT_THAT(report, AllOf(HasSubstr("[rank 0]"), HasSubstr("all-reduce #1 (4194304 bytes)"),
                                HasSubstr("is not over after 4."), HasSubstr("was aborted")));
      c10::cuda::device_synchronize();  // the kernel that waited is gone
      EXPECT_EQ(at::ones({10}, on_gpu(at::kFloat)).sum().item<double>(), 10);
    }
    reported.arrive_and_wait();
    const auto teardown = Clock::now();
    comm.reset();
    EXPECT_LT(seconds_since(teardown), 15) << "rank " << rank;
  });
}

TEST_F(NcclPair, DestructionDoesNotHangOnACollectiveThatCannotEnd) {
  std::barrier<> destroyed(2);
  run_gpus(2, [&](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    auto comm = make_nccl_communicator(store, rank, 2, {.timeout = 30s});
    at::Tensor data = at::ones({1 << 20}, on_gpu(at::kFloat));
    comm->sum(data)->wait();
    c10::cuda::device_synchronize();
    TransferPtr transfer;
    if (rank == 0) transfer = comm->sum(data);
    const auto start = Clock::now();
    if (rank == 0) comm.reset();
    EXPECT_LT(seconds_since(start), 25);
    if (transfer) {
      EXPECT_THAT(error_of([&] { transfer->wait(); }), HasSubstr("was destroyed while all-reduce #1"));
    }
    destroyed.arrive_and_wait();
    comm.reset();
    c10::cuda::device_synchronize();
  });
}

}  // namespace
}  // namespace lockstep
