// How a file is written: appended bytes are copied into buffers of the bucket, memory that the
// caller keeps is not. When there are enough of both for a part, the part is sent; several are in
// progress. A file that is smaller than a part is one PUT. All parts but the last have one size.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/storage/s3/bucket_internal.h"

namespace tilestone::s3 {
namespace {

constexpr uint64_t kMaxParts = 10'000;

uint64_t part_bytes(uint64_t expected_size) {
  return align_up(std::max(kPartBytes, expected_size / kMaxParts + 1), kPartBytes);
}

// Bytes in their order, and the buffers that some of them are in.
struct Body {
  std::vector<ByteView> views;
  std::vector<std::shared_ptr<Buffer>> buffers;
  uint64_t size = 0;
  uint32_t crc32 = 0;
};

struct PartInProgress {
  Body body;  // first, so that the request ends before its memory goes
  Pending<std::string> etag;
};

class NewObject : public WritableFile {
 public:
  NewObject(std::shared_ptr<Bucket> bucket, std::string key, std::string name,
            uint64_t expected_size, const Deadline& deadline)
      : bucket_(std::move(bucket)),
        key_(std::move(key)),
        name_(std::move(name)),
        part_bytes_(part_bytes(expected_size)),
        deadline_(deadline) {}

  ~NewObject() override {
    in_progress_.clear();
    if (!is_begun_) return;
    or_log(LogLevel::kWarning, "an unfinished upload stays", [&] {
      const Deadline deadline = Deadline::after(std::chrono::seconds(10));
      if (!id_.empty()) return void(bucket_->client.abort(key_, id_, deadline).wait());
      // No answer came that says the id. Nobody else writes an object with this name.
      for (const auto& each : bucket_->client.uploads(key_, {}, deadline).wait().uploads) {
        if (each.key == key_) bucket_->client.abort(key_, each.id, deadline).wait();
      }
    });
  }

  void append(Buffer buffer) override { append(buffer.view()); }

  void append(ByteView bytes) override {
    guarded([&] {
      while (!bytes.empty()) {
        const MutableByteView space = room();
        const size_t count = std::min({space.size(), bytes.size(), rest_of_part()});
        const uint32_t sum = copy_crc32(space.first(count), bytes.first(count), next_.crc32);
        filled_->set_size(filled_->size() + count);
        if (next_.buffers.empty() || next_.buffers.back() != filled_) {
          next_.buffers.push_back(filled_);
        }
        add(space.first(count), sum);
        bytes = bytes.subspan(count);
      }
    });
  }

  void append_kept(ByteView bytes, std::optional<uint32_t> sum) override {
    guarded([&] {
      if (sum && bytes.size() <= rest_of_part()) {
        return add(bytes, crc32_combine(next_.crc32, *sum, bytes.size()));
      }
      while (!bytes.empty()) {
        const size_t count = std::min(bytes.size(), rest_of_part());
        add(bytes.first(count), crc32(bytes.first(count), next_.crc32));
        bytes = bytes.subspan(count);
      }
    });
  }

  void sync(Deadline deadline) override {
    guarded([&] {
      if (deadline.expired()) {
        throw Error(ErrorCode::kTimeout, "the deadline passed before a file was written")
            .with_file(name_);
      }
      if (!is_finished_) finish(deadline);
    });
  }

  void close() override {
    guarded([&] {
      if (!is_finished_) finish(deadline_);
      is_open_ = false;
    });
  }

  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  // The first failure is thrown again by every later call.
  template <typename Step>
  void guarded(const Step& step) {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (!is_open_) throw Error(ErrorCode::kInvalidArgument, "the file is closed").with_file(name_);
    try {
      step();
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

  size_t rest_of_part() const { return part_bytes_ - next_.size; }

  // Free space in a buffer. Never waits for buffers that other files have.
  MutableByteView room() {
    if (filled_ != nullptr && filled_->size() < filled_->capacity()) {
      return filled_->space().subspan(filled_->size());
    }
    filled_ = nullptr;
    BufferPool& pool = **bucket_->buffers;
    Buffer buffer = pool.try_acquire();
    for (; !buffer && !in_progress_.empty(); buffer = pool.try_acquire()) end_one();
    if (!buffer) buffer = BufferPool::create(kPartBytes, kPartBytes)->acquire();
    buffer.set_size(0);
    filled_ = std::make_shared<Buffer>(std::move(buffer));
    return filled_->space();
  }

  // sum: of the part with these bytes.
  void add(ByteView bytes, uint32_t sum) {
    next_.views.push_back(bytes);
    next_.crc32 = sum;
    next_.size += bytes.size();
    size_ += bytes.size();
    if (next_.size == part_bytes_) send_part();
  }

  void send_part() {
    if (parts_.size() == kMaxParts) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("the file has more than {} parts of {} bytes", kMaxParts, part_bytes_))
          .with_file(name_);
    }
    is_begun_ = true;
    if (id_.empty()) id_ = bucket_->client.begin_upload(key_, true, deadline_).wait();
    while (in_progress_.size() >= kInProgress) end_one();
    Body body = std::exchange(next_, {});
    const int number = static_cast<int>(parts_.size()) + 1;
    parts_.push_back({number, "", body.crc32, body.size});
    const auto at_end = [this, number] {
      const std::lock_guard lock(mutex_);
      ended_.push_back(number);
      changed_.notify_one();
    };
    auto etag =
        bucket_->client.upload_part(key_, id_, number, body.views, body.crc32, deadline_, at_end);
    in_progress_.emplace(number, PartInProgress{std::move(body), std::move(etag)});
  }

  void end_one() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ended_.empty(); });
    const int number = ended_.front();
    ended_.pop_front();
    lock.unlock();
    const auto part = in_progress_.extract(number);
    parts_[static_cast<size_t>(number) - 1].etag = part.mapped().etag.wait();
  }

  // The name is a new one. So an existing object is somebody else's, whom the condition protects.
  void finish(const Deadline& deadline) {
    if (!id_.empty() && next_.size > 0) send_part();
    while (!in_progress_.empty()) end_one();
    if (!make(deadline)) {
      throw Error(ErrorCode::kAlreadyExists, "cannot create a file")
          .with_file(name_)
          .with_errno(EEXIST);
    }
    is_begun_ = false;
    next_ = {};
    filled_ = nullptr;
    is_finished_ = true;
  }

  // False: there is such an object. What the coordinator has found out (store.cc) its ranks in
  // other processes don't know: a bucket without conditions says so.
  bool make(const Deadline& deadline) {
    if (bucket_->put_if_absent != Bucket::Known::kNo) {
      try {
        return make_if(Condition::absent(), deadline);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnsupported) throw;
      }
      auto assumed = Bucket::Known::kAssumed;
      bucket_->put_if_absent.compare_exchange_strong(assumed, Bucket::Known::kNo);
    }
    return make_if(Condition::always(), deadline);
  }

  bool make_if(const Condition& condition, const Deadline& deadline) {
    Client& client = bucket_->client;
    const MaybeEtag etag =
        id_.empty() ? client.put(key_, next_.views, condition, next_.crc32, deadline).wait()
                    : client.complete(key_, id_, parts_, condition, deadline).wait();
    return etag.has_value();
  }

  const std::shared_ptr<Bucket> bucket_;
  const std::string key_, name_;
  const uint64_t part_bytes_;
  const Deadline deadline_;
  uint64_t size_ = 0;
  std::shared_ptr<Buffer> filled_;  // the buffer that is being filled
  Body next_;                       // of the next part
  std::string id_;                  // of the upload
  std::vector<Part> parts_;
  std::map<int, PartInProgress> in_progress_;  // by number
  std::exception_ptr failure_;
  bool is_begun_ = false;  // an upload, which has not ended
  bool is_finished_ = false, is_open_ = true;
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::deque<int> ended_;  // numbers of parts in progress
};

}  // namespace

std::unique_ptr<WritableFile> new_upload(std::shared_ptr<Bucket> bucket, std::string key,
                                         std::string name, uint64_t expected_size,
                                         const Deadline& deadline) {
  return std::make_unique<NewObject>(std::move(bucket), std::move(key), std::move(name),
                                     expected_size, deadline);
}

}  // namespace tilestone::s3
