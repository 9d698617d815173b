#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/save/lazy_staging_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

// Bytes. While the save's thread copies one block, seal() waits.
constexpr uint64_t kSampledBlock = 4u << 20;
constexpr double kShareOfSealing = 0.8;  // of the remaining time
// Samples of a tensor with at most so many blocks. Reading one costs a cache miss.
constexpr uint64_t kSamples = 32;
constexpr uint64_t kSampleBytes = 64;  // a cache line

Error changed(const std::string& key) {
  return Error(ErrorCode::kInvalidArgument, "the tensor was changed before it was staged")
      .with_key(key)
      .with_hint(
          "call staged.result() before the first change (a step of a torch optimizer does it), or "
          "save with stage=\"copy\"");
}

// The hash of the bits of `samples` samples (at most kSamples) of bytes [begin, end) of a flattened
// tensor: one somewhere in each of as many equal parts. They are irregular, so that a change of
// some columns of a matrix, for example, does not fall between all of them.
uint64_t sample(const StridedView& tensor, uint64_t begin, uint64_t end, uint64_t samples) {
  constexpr uint64_t kScatter = 0x9e3779b97f4a7c15;  // 2^64 / the golden ratio
  std::array<std::byte, kSamples * kSampleBytes> bits;
  uint64_t filled = 0;
  const uint64_t part = (end - begin) / samples;
  const uint64_t length = std::min(part, kSampleBytes);
  for (uint64_t i = 0; i < samples; ++i) {
    const uint64_t first = begin + i * part;
    const uint64_t lines = (part - length) / kSampleBytes + 1;
    const uint64_t at = first + ((first + 1) * kScatter >> 32) % lines * kSampleBytes;
    pack_range(tensor, at, {bits.data() + filled, length});
    filled += length;
  }
  return xxh3_64({bits.data(), filled});
}

}  // namespace

LazyStaging::LazyStaging(WatchTensors watch, Look look)
    : watch_(std::move(watch)), look_(std::move(look)), sealed_("staging", Deadline::never()) {}

void LazyStaging::begin(StagedLater left, std::shared_ptr<StagingMemory> memory,
                        std::shared_ptr<ThreadPool> threads) {
  const std::lock_guard lock(mutex_);
  copies_ = std::move(left.copies);
  for (size_t i = 0; i < copies_.size(); ++i) {
    const uint64_t bytes = copies_[i].from.bytes();
    const uint64_t each =
        std::max<uint64_t>(1, kSamples / ((bytes + kSampledBlock - 1) / kSampledBlock));
    for (uint64_t at = 0; at < bytes; at += kSampledBlock) {
      const uint64_t end = std::min(bytes, at + kSampledBlock);
      const uint64_t lines = std::max<uint64_t>(1, (end - at) / kSampleBytes);
      blocks_.push_back({i, at, end, std::min(each, lines)});
    }
  }
  memory_ = std::move(memory);
  threads_ = std::move(threads);
  fetching_ = std::move(left.fetching);
  is_watched_ = left.is_watched;
  for_each(blocks_.size(), [&](size_t i) { blocks_[i].sample = sample_of(blocks_[i]); });
  if (blocks_.empty() && fetching_.empty()) end_sealing(nullptr);
}

uint64_t LazyStaging::sample_of(const Block& block) const {
  const StridedView tensor = copies_[block.copy].from.strided_view();
  return sample(tensor, block.begin, block.end, block.samples);
}

// ---- The save's thread

void LazyStaging::read(const Deadline& deadline) {
  for (bool more = true; more && !is_wanted_;) {
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while staging");
    const std::lock_guard lock(mutex_);
    try {
      more = !sealed_.done() && advance();
      if (!more && !is_watched_) end_sealing(nullptr);
    } catch (...) {
      end_sealing(std::make_exception_ptr(current_error()));
      throw;
    }
  }
  if (is_wanted_) sealed_.wait(Deadline::never());  // seal() is copying the rest
}

bool LazyStaging::advance() {
  if (copied_ < blocks_.size()) {
    copy(blocks_[copied_++]);
  } else if (!fetching_.empty()) {
    fetching_.wait_for_first();
  } else if (compared_ < blocks_.size()) {
    compare(blocks_[compared_++]);
  }
  return !fetching_.empty() || compared_ < blocks_.size();
}

void LazyStaging::copy(const Block& block) const {
  const LateCopy& copy = copies_[block.copy];
  const uint64_t size = block.end - block.begin;
  pack_range(copy.from.strided_view(), block.begin, {copy.to + block.begin, size});
  const auto copied = StridedView::contiguous(copy.to, {static_cast<int64_t>(block.end)}, 1);
  if (sample(copied, block.begin, block.end, block.samples) != block.sample) {
    throw changed(copy.key);
  }
}

void LazyStaging::compare(const Block& block) {
  const LateCopy& copy = copies_[block.copy];
  again_.resize(block.end - block.begin);
  pack_range(copy.from.strided_view(), block.begin, again_);
  if (std::memcmp(again_.data(), copy.to + block.begin, again_.size()) != 0) {
    throw changed(copy.key);
  }
}

void LazyStaging::expect_sealed(const Deadline& deadline) {
  // Sooner, so that the other ranks learn why.
  if (!sealed_.wait(deadline.sooner(kShareOfSealing))) {
    throw Error(ErrorCode::kTimeout,
                "the save can't end, because the program has not called staged.result()")
        .with_hint(
            "with stage=\"lazy\" call it before the state changes; a step of a torch optimizer "
            "does so");
  }
  if (const auto failure = sealed_.failure(false)) std::rethrow_exception(failure);
}

void LazyStaging::end(std::exception_ptr why) {
  const std::lock_guard lock(mutex_);
  end_sealing(std::move(why));
}

// ---- The program's thread

std::exception_ptr LazyStaging::seal() {
  is_wanted_ = true;
  const std::lock_guard lock(mutex_);
  if (!sealed_.done()) {
    try {
      copy_rest_and_look();
      end_sealing(nullptr);
    } catch (...) {
      end_sealing(std::make_exception_ptr(current_error()));
    }
  }
  return sealed_.failure(false);
}

// The look comes last, so that it also finds what another thread of the program changes meanwhile,
// if that operation has ended.
void LazyStaging::copy_rest_and_look() {
  for_each(blocks_.size() - copied_, [&](size_t i) { copy(blocks_[copied_ + i]); });
  copied_ = blocks_.size();
  while (!fetching_.empty()) fetching_.wait_for_first();
  for_each(blocks_.size(), [&](size_t i) {
    if (sample_of(blocks_[i]) != blocks_[i].sample) throw changed(copies_[blocks_[i].copy].key);
  });
  if (const auto key = look_()) throw changed(*key);
}

void LazyStaging::for_each(size_t count, const std::function<void(size_t)>& body) const {
  if (threads_ != nullptr && count > 1) {
    threads_->parallel_for(count, body);
  } else {
    for (size_t i = 0; i < count; ++i) body(i);
  }
}

// Also forgets the tensors.
void LazyStaging::end_sealing(std::exception_ptr failure) {
  if (!sealed_.end(std::move(failure))) return;
  copies_.clear();
  blocks_.clear();
  copied_ = compared_ = 0;
  fetching_ = {};
  memory_.reset();
  threads_.reset();
  again_ = {};
  watch_ = {};
  look_ = nullptr;
}

}  // namespace tilestone::engine
