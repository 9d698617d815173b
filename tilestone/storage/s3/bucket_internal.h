// What the stores of one bucket share, and the files that they write and read.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/per_process.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/storage.h"

namespace tilestone::s3 {

// For calls that have no deadline of their own, within one that has: see Storage::until().
inline Deadline call_deadline(const Deadline& whole = Deadline::never()) {
  using std::chrono::seconds;
  return Deadline::after(
      std::clamp<std::chrono::nanoseconds>(whole.remaining(), seconds(2), seconds(60)));
}

// For small requests: none is sent again and again for ever.
inline Deadline bounded(const Deadline& deadline) {
  return deadline.is_never() ? call_deadline().with_interrupt(deadline.interrupt()) : deadline;
}

inline constexpr uint64_t kPartBytes = 8u << 20;
inline constexpr size_t kInProgress = 16;   // requests of one read, parts of one file
inline constexpr size_t kPartBuffers = 12;  // of kPartBytes, for what a file does not keep

struct Bucket {
  Bucket(Config config, std::string bucket)
      : client(std::move(config), bucket), name(std::move(bucket)) {}

  enum class Known : uint8_t { kNo, kYes, kAssumed };

  Client client;
  const std::string name;
  std::atomic<Known> put_if_absent = Known::kAssumed, put_if_tag = Known::kAssumed;
  const PerProcess<std::shared_ptr<BufferPool>> buffers{[] {
    return std::make_unique<std::shared_ptr<BufferPool>>(
        BufferPool::create(kPartBuffers * kPartBytes, kPartBytes));
  }};
};

std::unique_ptr<WritableFile> new_upload(std::shared_ptr<Bucket> bucket, std::string key,
                                         std::string name, uint64_t expected_size,
                                         const Deadline& deadline);

std::unique_ptr<ReadableFile> open_object(std::shared_ptr<Bucket> bucket, std::string key,
                                          std::string name, const Deadline& deadline);
// Of files that a store with this root ("", "prefix/") has opened.
void read_objects(const Bucket& bucket, const std::string& root, std::span<const ReadOp> ops,
                  const ReadOptions& options, const ReadDone& done);

}  // namespace tilestone::s3
