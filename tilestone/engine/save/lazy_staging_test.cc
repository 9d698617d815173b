// Staging that goes on after the call: what is noticed, and what the copies hold.
#include "tilestone/engine/save/lazy_staging_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine::lazy_staging_test {

using testing::HasSubstr;

constexpr uint64_t kMany = (9u << 20) + 4;  // bytes: three blocks, of which the last is short

// Tensors of a program, with their copies.
class Tensors {
 public:
  void add(const std::string& key, uint64_t bytes) {
    Bytes& memory = *memory_.emplace_back(std::make_unique<Bytes>(bytes));
    std::mt19937_64 random(memory_.size());
    for (uint64_t at = 0; at < bytes; at += 8) {
      const uint64_t word = random();
      std::memcpy(&memory[at], &word, std::min<uint64_t>(8, bytes - at));
    }
    add(key, TensorView::contiguous(memory.data(), DType::kUInt8, {static_cast<int64_t>(bytes)}));
  }
  void add(const std::string& key, TensorView view) {
    Bytes& to = *copies_.emplace_back(std::make_unique<Bytes>(view.bytes()));
    Bytes expected(view.bytes());
    pack_range(view.strided_view(), 0, expected);
    expected_.push_back(std::move(expected));
    late_.push_back({key, std::move(view), to.data()});
  }
  const std::vector<LateCopy>& late() const { return late_; }
  std::byte* memory(size_t i) { return memory_.at(i)->data(); }
  // Overwrites bytes [begin, end) of a tensor with others.
  void change(size_t i, uint64_t begin, uint64_t end) {
    std::memset(memory(i) + begin, ++changes_, end - begin);
  }
  void change_all() {
    for (size_t i = 0; i < memory_.size(); ++i) change(i, 0, memory_[i]->size());
  }
  bool copied() const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (*copies_[i] != expected_[i]) return false;
    }
    return true;
  }

 private:
  std::vector<std::unique_ptr<Bytes>> memory_;
  std::vector<std::unique_ptr<Bytes>> copies_;
  std::vector<Bytes> expected_;
  std::vector<LateCopy> late_;
  int changes_ = 0;
};

// A write that ThreadSanitizer does not see: it is there to be noticed by the reader.
__attribute__((no_sanitize("thread"))) void flip(volatile char* at) { *at = ~*at; }

std::shared_ptr<LazyStaging> begun(
    const Tensors& tensors, std::shared_ptr<ThreadPool> threads = {},
    LazyStaging::Look look = [] { return std::nullopt; }) {
  auto staging = std::make_shared<LazyStaging>(WatchTensors(), std::move(look));
  staging->begin({tensors.late(), {}}, std::make_shared<StagingMemory>(), std::move(threads));
  return staging;
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    if (failure) std::rethrow_exception(failure);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// What the save's thread does. Returns the failure's text.
std::string read_all(LazyStaging& staging) {
  try {
    staging.read(Deadline::after(std::chrono::seconds(60)));
    staging.expect_sealed(Deadline::after(std::chrono::seconds(60)));
    return "";
  } catch (...) {
    staging.end(std::current_exception());
    return text_of(std::current_exception());
  }
}

TEST(LazyStaging, SealCopiesWhatIsLeftAndThenTheTensorsMayChange) {
  for (const bool with_threads : {false, true}) {
    Tensors tensors;
    for (const uint64_t bytes : {kMany, uint64_t{1}, uint64_t{63}, uint64_t{70'000}}) {
      tensors.add("w" + std::to_string(bytes), bytes);
    }
    tensors.add("transposed", TensorView::strided(tensors.memory(3), DType::kUInt16, {175, 200},
                                                  {1, 175}, tensors.memory(3), 70'000));
    int looks = 0;
    const auto staging =
        begun(tensors, with_threads ? std::make_shared<ThreadPool>(2) : nullptr, [&] {
          ++looks;
          return std::nullopt;
        });
    EXPECT_FALSE(staging->is_sealed());
    EXPECT_EQ(staging->seal(), nullptr);
    EXPECT_TRUE(staging->is_sealed());
    tensors.change_all();
    EXPECT_EQ(staging->seal(), nullptr);
    EXPECT_EQ(looks, 1);
    EXPECT_EQ(read_all(*staging), "");
    EXPECT_TRUE(tensors.copied());
  }
}

TEST(LazyStaging, NothingThatIsLeftIsSealedAtOnce) { EXPECT_TRUE(begun(Tensors())->is_sealed()); }

TEST(LazyStaging, ChangesOfATensorAreNoticedByTheCounterOrBySamples) {
  Tensors tensors;
  tensors.add("first", 100'000);
  tensors.add("second", kMany);
  const auto counted =
      begun(tensors, nullptr, [] { return std::optional<std::string>("the counted one"); });
  EXPECT_THAT(text_of(counted->seal()), HasSubstr("the counted one"));
  EXPECT_THAT(read_all(*counted), HasSubstr("was changed before it was staged"));

  // Without a counter: the whole tensor; any quarter of it; one of its blocks.
  struct Change {
    size_t tensor;
    uint64_t begin;
    uint64_t end;
  };
  for (const Change& part : std::vector<Change>{{0, 0, 100'000},
                                                {0, 0, 25'000},
                                                {0, 40'000, 65'000},
                                                {0, 75'000, 100'000},
                                                {1, 0, kMany},
                                                {1, 4u << 20, 8u << 20},
                                                {1, 8u << 20, kMany}}) {
    for (const bool with_threads : {false, true}) {
      const auto threads = with_threads ? std::make_shared<ThreadPool>(2) : nullptr;
      const auto staging = begun(tensors, threads);
      tensors.change(part.tensor, part.begin, part.end);
      EXPECT_THAT(text_of(staging->seal()), HasSubstr(part.tensor == 0 ? "first" : "second"));
    }
  }
}

// A matrix has 1,000 rows of 4 KiB: samples at regular distances would all be in the same columns.
TEST(LazyStaging, AChangeOfSomeColumnsOfAMatrixIsNoticed) {
  Tensors tensors;
  tensors.add("matrix", 1000 * 4096);
  for (uint64_t column = 0; column < 4096; column += 512) {
    const auto staging = begun(tensors);
    for (uint64_t row = 0; row < 1000; ++row) {
      tensors.change(0, row * 4096 + column, row * 4096 + column + 512);
    }
    EXPECT_THAT(text_of(staging->seal()), HasSubstr("matrix")) << column;
  }
}

// A program that exchanges parameters with their averages and back, by ways that are not counted.
TEST(LazyStaging, AChangeThatIsUndoneIsNoticedIfItWasCopied) {
  Tensors tensors;
  tensors.add("w", 100'000);
  const auto staging = begun(tensors);
  const Bytes before(tensors.memory(0), tensors.memory(0) + 100'000);
  tensors.change_all();
  EXPECT_THAT(read_all(*staging), HasSubstr("was changed before it was staged"));
  std::memcpy(tensors.memory(0), before.data(), before.size());
  EXPECT_THAT(text_of(staging->seal()), HasSubstr("was changed before it was staged"));
}

TEST(LazyStaging, TheSecondReadFindsWhatNoSampleShows) {
  Tensors tensors;
  tensors.add("w", 8u << 20);  // copied in two blocks
  auto* const one = reinterpret_cast<char*>(tensors.memory(0)) + 5'000'000;
  bool noticed = false;
  for (int turn = 0; turn < 200 && !noticed; ++turn) {
    const auto staging = begun(tensors);
    std::string text;
    std::atomic<bool> ended = false;
    std::thread reader([&] {
      try {
        staging->read(Deadline::never());
      } catch (...) {
        text = text_of(std::current_exception());
      }
      ended = true;
    });
    while (!ended) flip(one);  // until it differs between the two reads
    reader.join();
    noticed = text.find("was changed before it was staged") != std::string::npos;
  }
  EXPECT_TRUE(noticed);
}

TEST(LazyStaging, WithoutSealTheSaveFailsAtItsDeadline) {
  Tensors tensors;
  tensors.add("w", 100'000);
  const auto staging = begun(tensors);
  EXPECT_THROW(staging->read(Deadline::after(std::chrono::seconds(0))), Error);
  staging->read(Deadline::never());
  EXPECT_TRUE(tensors.copied());
  EXPECT_FALSE(staging->is_sealed());
  try {
    staging->expect_sealed(Deadline::after(std::chrono::milliseconds(50)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_THAT(error.what(), HasSubstr("has not called staged.result()"));
    staging->end(std::current_exception());
  }
  EXPECT_THAT(text_of(staging->seal()), HasSubstr("has not called staged.result()"));
}

// The save's thread reads while the program seals at a random moment and changes everything at
// once. Under ThreadSanitizer this shows that nothing is read after seal().
TEST(LazyStaging, SealAtAnyMomentBesideTheReadingThread) {
  std::mt19937 random(1);
  const auto threads = std::make_shared<ThreadPool>(2);
  for (int turn = 0; turn < 20; ++turn) {
    Tensors tensors;
    for (const uint64_t bytes : {uint64_t{1'000'000}, kMany, uint64_t{70'000}}) {
      tensors.add("w" + std::to_string(bytes), bytes);
    }
    const auto staging = begun(tensors, turn % 2 == 0 ? threads : nullptr);
    std::string text = "not run";
    std::thread reader([&] { text = read_all(*staging); });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    const bool fails = turn % 5 == 4;
    if (fails) {  // as a save does that another rank has ended
      staging->end(std::make_exception_ptr(Error(ErrorCode::kRankFailed, "another rank failed")));
    }
    const std::string sealed = text_of(staging->seal());
    tensors.change_all();
    reader.join();
    EXPECT_THAT(sealed, fails ? HasSubstr("another rank failed") : HasSubstr(""));
    EXPECT_EQ(text, sealed);
    EXPECT_TRUE(fails || tensors.copied());
  }
}

}  // namespace tilestone::engine::lazy_staging_test
