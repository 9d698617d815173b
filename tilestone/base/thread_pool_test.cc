#include "tilestone/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"

namespace tilestone::thread_pool_test {

TEST(ThreadPool, RunsEachIndexOnce) {
  for (const size_t threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const size_t count : {0, 1, 2, 100, 10000}) {
      std::vector<int> runs(count);
      pool.parallel_for(count, [&](size_t i) { ++runs[i]; });
      EXPECT_EQ(runs, std::vector<int>(count, 1)) << threads << " threads";
    }
  }
}

TEST(ThreadPool, WorkersAndTheCallerRunAtOnce) {
  ThreadPool pool(4);
  std::latch all_here(4);  // each body waits until all four run, so one thread alone would hang
  pool.parallel_for(4, [&](size_t) { all_here.arrive_and_wait(); });
}

size_t threads_of_this_process() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

TEST(ThreadPool, StartsWorkersOnlyWhenTheyHaveWork) {
  const size_t before = threads_of_this_process();
  ThreadPool pool(50);
  pool.parallel_for(1, [](size_t) {});
  ThreadPool(1).parallel_for(100, [](size_t) {});
  EXPECT_EQ(threads_of_this_process(), before);
  std::latch all_here(3);
  pool.parallel_for(3, [&](size_t) { all_here.arrive_and_wait(); });
  EXPECT_EQ(threads_of_this_process(), before + 2);
  std::latch all_here_again(3);
  pool.parallel_for(3, [&](size_t) { all_here_again.arrive_and_wait(); });
  EXPECT_LE(threads_of_this_process(), before + 4);  // the first two may not wait again yet
}

TEST(ThreadPool, NestedCallsAndSeveralCallersGetAsManyWorkersAsThereAre) {
  ThreadPool pool(6);
  std::latch all_here(6);  // each of the two outer bodies, and two helpers of each
  pool.parallel_for(
      2, [&](size_t) { pool.parallel_for(3, [&](size_t) { all_here.arrive_and_wait(); }); });
}

TEST(ThreadPool, BodiesWorkForTheCallersCall) {
  ThreadPool pool(3);
  int call = 0;
  std::atomic<int> others = 0;
  {
    const CallScope scope({&call});
    pool.parallel_for(50, [&](size_t) { others += CallScope::current().call != &call; });
  }
  EXPECT_EQ(others, 0);
  pool.parallel_for(50, [&](size_t) { others += CallScope::current().call != nullptr; });
  EXPECT_EQ(others, 0);
}

TEST(ThreadPool, NestedCallsEnd) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  pool.parallel_for(8, [&](size_t) {
    pool.parallel_for(8, [&](size_t) { pool.parallel_for(4, [&](size_t) { ++runs; }); });
  });
  EXPECT_EQ(runs, 8 * 8 * 4);
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  {
    std::vector<std::jthread> callers;
    for (int i = 0; i < 5; ++i) {
      callers.emplace_back([&] {
        for (int round = 0; round < 50; ++round) pool.parallel_for(10, [&](size_t) { ++runs; });
      });
    }
  }
  EXPECT_EQ(runs, 5 * 50 * 10);
}

TEST(ThreadPool, RethrowsTheFirstExceptionAndStartsNoMore) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  try {
    pool.parallel_for(1000, [&](size_t i) {
      ++runs;
      throw std::runtime_error(std::to_string(i));
    });
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error&) {
  }
  EXPECT_LE(runs, 2);  // the worker and the caller may each have started one
  pool.parallel_for(10, [&](size_t) { ++runs; });
  EXPECT_GE(runs, 11);  // and the pool works on
}

TEST(ThreadPool, ReturnsOnlyWhenWhatWasStartedHasEnded) {
  ThreadPool pool(3);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> inside = 0;
    std::latch both_started(2);
    EXPECT_THROW(pool.parallel_for(2,
                                   [&](size_t i) {
                                     ++inside;
                                     both_started.arrive_and_wait();
                                     if (i == 0) {
                                       --inside;
                                       throw Error(ErrorCode::kIo, "disk");
                                     }
                                     std::this_thread::yield();
                                     --inside;
                                   }),
                 Error);
    EXPECT_EQ(inside, 0);
  }
}

TEST(ThreadPool, RefusesToHaveNoThreads) { EXPECT_THROW(ThreadPool(0), Error); }

}  // namespace tilestone::thread_pool_test
