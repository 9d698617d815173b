// The messages of the ranks of a save (comm/store_communicator.h) as files. Of a save in the
// background (engine/save/background_meeting.cc describes the protocol):
//
//   .tilestone/SAVE_ID.receipt-GROUP-RANK   what the rank has written
//   .tilestone/SAVE_ID.receipt-GROUP-joiner the number of the rank that begins to make the next
//   .tilestone/SAVE_ID.receipt-GROUP-all    the same of a group, in a large world
//   .tilestone/SAVE_ID.receipt-claim-RANK   locked while the rank's process lives, in a small world
//   .tilestone/SAVE_ID.receipt-failed       why a rank could not write, which ends the save
//   .tilestone/SAVE_ID.receipt-ended        the outcome: published, or the error of all ranks
//
// attempt_files_internal.h has the names of those of a save by files.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

class FileMessages : public MessageStore {
 public:
  FileMessages(std::shared_ptr<Storage> storage, std::string save_id)
      : storage_(std::move(storage)), save_id_(std::move(save_id)) {}

  std::optional<Bytes> get(const std::string& name) override;
  std::vector<bool> exist(std::span<const std::string> names) override;
  // Where each call is a request: one listing, and requests side by side.
  std::vector<std::optional<Bytes>> get_all(std::span<const std::string> names) override;
  bool finds_many() const override { return storage_->facts().costs_requests; }
  void remove(std::span<const std::string> names) override;
  std::string file_of(const std::string& name) const override = 0;
  const std::string& save_id() const { return save_id_; }

 protected:
  Storage& storage() const { return *storage_; }

 private:
  const std::shared_ptr<Storage> storage_;
  const std::string save_id_;
};

// Of a save by files: durable when the call that leaves one returns.
class DurableMessages : public FileMessages {
 public:
  using FileMessages::FileMessages;
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) override;
  std::string file_of(const std::string& name) const override;
};
inline constexpr const char *kHeadMessage = "head", *kOutcomeMessage = "outcome";

// Of a save in the background. They are whole, and need not be durable: after a crash nobody
// continues the save.
class MessageFiles : public FileMessages {
 public:
  // `process`: a name of this process in the save.
  MessageFiles(std::shared_ptr<Storage> storage, std::string save_id, const std::string& process);
  ~MessageFiles() override;  // removes what reserve() has made, if it was not used

  // Makes the file that will be the next message, so that there is room for it.
  void reserve();

  bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) override;
  std::string file_of(const std::string& name) const override;

 private:
  const std::string temporary_;
  std::unique_ptr<WritableFile> reserved_;  // temporary_; null: not there, or used
};

// Whether a name of `.tilestone` is one of these; `base`: the name after SAVE_ID.
bool is_message_suffix(std::string_view base);

// The content of such a file: a version, whether it is an error, and a checksum.
struct BackgroundMessage {
  std::optional<Error> error;  // nullopt: the rank has written, or the checkpoint is published
  Bytes receipt = {};          // Receipt::encode(); empty in an outcome
  // In an outcome with an error: it came while the checkpoint was published, which may exist.
  bool may_exist = false;
  int rank = -1;  // of an error: who has left it

  Bytes encode() const;
  // Error(kCorrupt) for other bytes. An empty file is from a rank that could not say why it failed.
  static BackgroundMessage decode(ByteView bytes, const std::string& file);
};

}  // namespace tilestone::engine
