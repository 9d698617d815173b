#include <algorithm>
#include <cstring>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/save/lazy_staging_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

// Bytes. While the save's thread copies one block, seal() waits.
constexpr uint64_t kBlock = 4u << 20;
constexpr double kShareOfSealing = 0.8;  // of the remaining time

Error changed(const std::string& key) {
  return Error(ErrorCode::kInvalidArgument, "the tensor was changed before it was staged")
      .with_key(key)
      .with_hint(
          "call staged.result() before the first change (a step of a torch optimizer does it), or "
          "save with stage=\"copy\"");
}

}  // namespace

LazyStaging::LazyStaging(WatchTensors watch, Look look)
    : watch_(std::move(watch)), look_(std::move(look)), sealed_("staging", Deadline::never()) {}

void LazyStaging::begin(std::vector<LateCopy> left, std::shared_ptr<StagingMemory> memory,
                        std::shared_ptr<ThreadPool> threads) {
  const std::lock_guard lock(mutex_);
  copies_ = std::move(left);
  for (size_t i = 0; i < copies_.size(); ++i) {
    const uint64_t bytes = copies_[i].from.bytes();
    for (uint64_t at = 0; at < bytes; at += kBlock) {
      blocks_.push_back({i, at, std::min(bytes, at + kBlock)});
    }
  }
  memory_ = std::move(memory);
  threads_ = std::move(threads);
  if (blocks_.empty()) end_sealing(nullptr);
}

// ---- The save's thread

void LazyStaging::read(const Deadline& deadline) {
  for (bool more = true; more && !is_wanted_;) {
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while staging");
    const std::lock_guard lock(mutex_);
    more = !sealed_.done() && advance();
  }
  if (is_wanted_) sealed_.wait(Deadline::never());  // seal() is copying the rest
}

bool LazyStaging::advance() {
  if (copied_ < blocks_.size()) {
    copy(blocks_[copied_++]);
  } else if (compared_ < blocks_.size()) {
    compare(blocks_[compared_++]);
  }
  return compared_ < blocks_.size();
}

void LazyStaging::copy(const Block& block) const {
  const LateCopy& copy = copies_[block.copy];
  pack_range(copy.from.strided_view(), block.begin,
             {copy.to + block.begin, block.end - block.begin});
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
  const size_t left = blocks_.size() - copied_;
  const auto one = [&](size_t i) { copy(blocks_[copied_ + i]); };
  if (threads_ != nullptr && left > 1) {
    threads_->parallel_for(left, one);
  } else {
    for (size_t i = 0; i < left; ++i) one(i);
  }
  copied_ = blocks_.size();
  if (const auto key = look_()) throw changed(*key);
}

// Also forgets the tensors.
void LazyStaging::end_sealing(std::exception_ptr failure) {
  if (!sealed_.end(std::move(failure))) return;
  copies_.clear();
  blocks_.clear();
  copied_ = compared_ = 0;
  memory_.reset();
  threads_.reset();
  again_ = {};
  watch_ = nullptr;
  look_ = nullptr;
}

}  // namespace tilestone::engine
