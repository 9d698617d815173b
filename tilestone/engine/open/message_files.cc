#include "tilestone/engine/open/message_files_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/thread_pool.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/sealed_internal.h"
#include "tilestone/format/index.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kMessageVersion = 2;
constexpr size_t kRequestsAtOnce = 16;
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

// ---- What all have in common

std::optional<Bytes> FileMessages::get(const std::string& name) {
  return read_if_there(storage(), file_of(name));
}

std::vector<bool> FileMessages::exist(std::span<const std::string> names) {
  std::vector<bool> there;
  if (!finds_many() || names.size() < 2) {
    for (const auto& name : names) there.push_back(storage().stat(file_of(name)).has_value());
    return there;
  }
  std::string prefix = file_of(names.front());
  std::vector<std::string> files;
  for (const std::string& name : names) {
    files.push_back(file_of(name));
    prefix.resize(
        static_cast<size_t>(std::ranges::mismatch(prefix, files.back()).in1 - prefix.begin()));
  }
  const std::vector<std::string> listed = storage().list_files(prefix);
  for (const std::string& file : files) there.push_back(contains_name(listed, file));
  return there;
}

std::vector<std::optional<Bytes>> FileMessages::get_all(std::span<const std::string> names) {
  if (!finds_many() || names.size() < 2) return MessageStore::get_all(names);
  std::vector<std::optional<Bytes>> messages(names.size());
  ThreadPool(std::min(names.size(), kRequestsAtOnce)).parallel_for(names.size(), [&](size_t i) {
    messages[i] = get(names[i]);
  });
  return messages;
}

void FileMessages::remove(std::span<const std::string> names) {
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back(file_of(name));
  remove_files(storage(), files);
}

// ---- Of a save in the background

MessageFiles::MessageFiles(std::shared_ptr<Storage> storage, std::string save_id,
                           const std::string& process)
    : FileMessages(std::move(storage), std::move(save_id)),
      temporary_(temporary_name(this->save_id(), "receipt-" + process)) {}

MessageFiles::~MessageFiles() {
  const bool is_file = reserved_ != nullptr && storage().facts().renames;
  reserved_ = nullptr;
  if (is_file) remove_files(storage(), std::vector{temporary_});
}

std::string MessageFiles::file_of(const std::string& name) const {
  std::string file(kTilestoneDirectory);
  file.append("/").append(save_id()).append(kMessagePart).append(name);
  std::replace(file.begin() + static_cast<std::ptrdiff_t>(file.size() - name.size()), file.end(),
               '/', '-');
  return file;
}

void MessageFiles::reserve() { reserved_ = storage().create(temporary_); }

bool MessageFiles::put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) {
  return storage().put_message(file_of(name), bytes, temporary_, std::exchange(reserved_, nullptr),
                               deadline);
}

Bytes BackgroundMessage::encode() const {
  ByteWriter out;
  out.u8(kMessageVersion);
  out.u8(static_cast<uint8_t>(!error      ? Status::kWell
                              : may_exist ? Status::kUnknown
                                          : Status::kFailed));
  out.i64(rank);
  out.blob(error ? Bytes(error->encode()) : receipt);
  return sealed(std::move(out));
}

BackgroundMessage BackgroundMessage::decode(ByteView bytes, const std::string& file) {
  if (bytes.empty()) {
    return {Error(ErrorCode::kIo, "a rank could not write, and could not say why")
                .with_hint("its disk may be full; its log says more")};
  }
  return unsealed(bytes, file, kMessageVersion, [](ByteReader& in) {
    BackgroundMessage left;
    const auto status = static_cast<Status>(in.u8());
    if (status > Status::kUnknown) in.fail("an unknown status");
    left.rank = static_cast<int>(in.i64());
    const ByteView content = in.blob();
    if (status != Status::kWell) {
      left.error = Error::decode(content);
      left.may_exist = status == Status::kUnknown;
    } else {
      left.receipt.assign(content.begin(), content.end());
    }
    return left;
  });
}

// ---- Of a save by files

// Also syncs what is there already: the process that made it may have died before that.
bool DurableMessages::put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) {
  const std::string file = file_of(name), directory = file.substr(0, file.rfind('/'));
  const bool on_top = directory == kTilestoneDirectory;  // where others remove temporary files
  const std::string temporary =
      on_top ? attempt_temporary(save_id(), name) : file + "." + random_uuid() + ".tmp";
  const bool made = storage().put(file, bytes, Condition::absent(), temporary, deadline);
  if (!made) storage().settle(directory);
  if (!on_top) storage().settle(attempt_directory(save_id()));
  return made;
}

std::string DurableMessages::file_of(const std::string& name) const {
  if (name == kHeadMessage) return attempt_name(save_id());
  if (name == kOutcomeMessage) return outcome_name(save_id());
  const size_t end = name.rfind('/') + 1;
  const std::string last = name.substr(end);
  return attempt_directory(save_id()) + "/" + name.substr(0, end) +
         (last == "all"      ? "merged"
          : last == "joiner" ? last
                             : last + ".report");
}

}  // namespace tilestone::engine
