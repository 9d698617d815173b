#include "tilestone/engine/open/message_files_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kMessageVersion = 2;
constexpr std::string_view kMessagePart = ".receipt-";
constexpr std::string_view kEndedOfOlder = ".ended";  // the outcome, in version 1

enum class Status : uint8_t { kWell, kFailed, kUnknown };

}  // namespace

bool is_message_suffix(std::string_view base) {
  if (base == kEndedOfOlder) return true;
  return base.starts_with(kMessagePart) && base.size() > kMessagePart.size() &&
         std::all_of(base.begin() + 1, base.end(), [](char c) {
           return c == '-' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z');
         });
}

MessageFiles::MessageFiles(std::shared_ptr<Storage> storage, std::string save_id,
                           const std::string& process)
    : storage_(std::move(storage)),
      save_id_(std::move(save_id)),
      temporary_(temporary_name(save_id_, "receipt-" + process)) {}

MessageFiles::~MessageFiles() {
  if (std::exchange(reserved_, nullptr) && storage_->directories() != nullptr)
    remove_files(*storage_, std::vector{temporary_});
}

std::string MessageFiles::file_of(const std::string& name) const {
  std::string file(kTilestoneDirectory);
  file.append("/").append(save_id_).append(kMessagePart).append(name);
  std::replace(file.begin() + static_cast<std::ptrdiff_t>(file.size() - name.size()), file.end(),
               '/', '-');
  return file;
}

void MessageFiles::reserve() { reserved_ = storage_->create(temporary_); }

void MessageFiles::write(ByteView bytes) {
  try {
    auto file = std::exchange(reserved_, nullptr);
    if (file == nullptr) file = storage_->create(temporary_, bytes.size());
    if (!bytes.empty()) file->append(bytes);
    file->close();
  } catch (...) {
    remove_files(*storage_, std::vector{temporary_});
    throw;
  }
}

bool MessageFiles::put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) {
  if (storage_->directories() == nullptr) {
    reserved_ = nullptr;
    return storage_->put(file_of(name), bytes, Condition::absent(), temporary_, deadline);
  }
  write(bytes);
  try {
    storage_->rename(temporary_, file_of(name), false);
    return true;
  } catch (const Error& error) {
    remove_files(*storage_, std::vector{temporary_});
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    return false;
  }
}

std::optional<Bytes> MessageFiles::get(const std::string& name) {
  return read_if_there(*storage_, file_of(name));
}

std::vector<bool> MessageFiles::exist(std::span<const std::string> names) {
  std::vector<bool> there;
  for (const std::string& name : names) there.push_back(storage_->stat(file_of(name)).has_value());
  return there;
}

void MessageFiles::remove(std::span<const std::string> names) {
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back(file_of(name));
  remove_files(*storage_, files);
}

Bytes BackgroundMessage::encode() const {
  ByteWriter out;
  out.u8(kMessageVersion);
  out.u8(static_cast<uint8_t>(!error      ? Status::kWell
                              : may_exist ? Status::kUnknown
                                          : Status::kFailed));
  out.i64(rank);
  out.blob(error ? Bytes(error->encode()) : receipt);
  const uint64_t sum = xxh3_64(out.bytes());
  out.u64(sum);
  return std::move(out).take();
}

BackgroundMessage BackgroundMessage::decode(ByteView bytes, const std::string& file) {
  if (bytes.empty()) {
    return {Error(ErrorCode::kIo, "a rank could not write, and could not say why")
                .with_hint("its disk may be full; its log says more")};
  }
  try {
    ByteReader in(bytes, file);
    if (in.u8() != kMessageVersion) {
      throw Error(ErrorCode::kUnsupported, file + " was written by another version of Tilestone");
    }
    BackgroundMessage left;
    const auto status = static_cast<Status>(in.u8());
    if (status > Status::kUnknown) in.fail("an unknown status");
    left.rank = static_cast<int>(in.i64());
    const ByteView content = in.blob();
    const uint64_t sum = xxh3_64(bytes.first(bytes.size() - in.remaining()));
    if (in.u64() != sum) in.fail("the checksum differs");
    in.expect_end();
    if (status != Status::kWell) {
      left.error = Error::decode(content);
      left.may_exist = status == Status::kUnknown;
    } else {
      left.receipt.assign(content.begin(), content.end());
    }
    return left;
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

}  // namespace tilestone::engine
