#include "tilestone/comm/store_communicator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr uint8_t kJoinedVersion = 1;
constexpr uint64_t kTrailerSize = 8;

int root_of(int size) { return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(size)))); }

}  // namespace

Bytes join_messages(std::span<const std::optional<Bytes>> messages) {
  ByteWriter out;
  out.u8(kJoinedVersion);
  out.varint(messages.size());
  for (const std::optional<Bytes>& one : messages) out.blob(*one);
  const uint64_t sum = xxh3_64(out.bytes());
  out.u64(sum);
  return std::move(out).take();
}

std::vector<Bytes> split_messages(ByteView bytes, const std::string& file) try {
  ByteReader in(bytes, file);
  if (bytes.size() < kTrailerSize) in.fail("too short");
  ByteReader body(in.raw(bytes.size() - kTrailerSize), file);
  if (in.u64() != xxh3_64(bytes.first(bytes.size() - kTrailerSize))) {
    in.fail("the checksum differs");
  }
  if (body.u8() != kJoinedVersion) body.fail("an unknown version");
  std::vector<Bytes> messages(body.count());
  for (Bytes& one : messages) {
    const ByteView view = body.blob();
    one.assign(view.begin(), view.end());
  }
  body.expect_end();
  return messages;
} catch (Error& error) {
  error.with_file(file);
  throw;
}

StoreCommunicator::StoreCommunicator(std::shared_ptr<MessageStore> store, int rank, int size,
                                     Tree tree)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      joins_(size > tree.most_names),
      removes_(tree.removes),
      group_size_(joins_ ? root_of(size) : size),
      found_(static_cast<size_t>(size)),
      seen_(static_cast<size_t>(size), false),
      next_group_(std::max(rank, 0) / group_size_),
      next_rank_(rank + 1) {}

int StoreCommunicator::end_of(int group) const { return std::min(size_, begin_of(group + 1)); }

std::string StoreCommunicator::name_of(int rank) const {
  return std::to_string(rank / group_size_) + "/" + std::to_string(rank);
}

std::vector<std::string> StoreCommunicator::names_of(int group) const {
  std::vector<std::string> names;
  for (int rank = begin_of(group); rank < end_of(group); ++rank) names.push_back(name_of(rank));
  return names;
}

std::vector<std::string> StoreCommunicator::names_of_groups() const {
  std::vector<std::string> names;
  for (int group = 0; joins_ && group < groups(); ++group) {
    names.insert(names.end(), {group_name(group), mark_name(group)});
  }
  return names;
}

Bytes decide(MessageStore& store, const std::string& name, ByteView mine, Deadline deadline,
             bool* was_first) {
  if (was_first != nullptr) *was_first = true;
  try {
    if (store.put_if_absent(name, mine, deadline)) return Bytes(mine.begin(), mine.end());
    if (was_first != nullptr) *was_first = false;
  } catch (const Error&) {
    // The answer may be lost. What is there counts, once a further request has found it there.
    if (!store.get(name)) throw;
    store.put_if_absent(name, mine, Deadline::never());
  }
  auto found = store.get(name);
  if (found) return *std::move(found);
  throw Error(ErrorCode::kIo, "a message that was there before is gone")
      .with_file(store.file_of(name));
}

std::vector<std::optional<Bytes>> MessageStore::get_all(std::span<const std::string> names) {
  std::vector<std::optional<Bytes>> messages;
  for (const std::string& name : names) messages.push_back(get(name));
  return messages;
}

// ---- Messages of single ranks

Bytes StoreCommunicator::leave(ByteView mine, Deadline deadline) {
  has_left_ = true;
  if (!removes_) return decide(*store_, name_of(rank_), mine, deadline);
  if (auto first = joined_message_of(rank_)) return *std::move(first);
  Bytes counts;
  try {
    counts = decide(*store_, name_of(rank_), mine, deadline);
  } catch (const Error&) {
    // Another process may have joined and removed the message.
    if (auto first = joined_message_of(rank_)) return *std::move(first);
    throw;
  }
  auto first = joined_message_of(rank_);
  if (!first) return counts;
  if (*first != counts) store_->remove(std::vector{name_of(rank_)});
  return *std::move(first);
}

void StoreCommunicator::keep(Bytes mine) {
  found_[static_cast<size_t>(rank_)] = std::move(mine);
  seen_[static_cast<size_t>(rank_)] = true;
}

// Looks first for the message that was missing before: as long as many are missing, one look is
// usually enough.
bool StoreCommunicator::all_are_there(int group) {
  const int begin = begin_of(group), count = end_of(group) - begin;
  const int first = next_rank_ >= begin && next_rank_ < begin + count ? next_rank_ - begin : 0;
  const bool at_once = store_->finds_many();
  const std::vector<bool> there =
      at_once ? store_->exist(names_of(group)) : std::vector<bool>(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const int number = (first + i) % count;
    next_rank_ = begin + number;
    auto seen = seen_[static_cast<size_t>(next_rank_)];
    seen = seen || there[static_cast<size_t>(number)] ||
           (!at_once && store_->exist(std::vector{name_of(next_rank_)}).front());
    if (!seen) return false;
  }
  return true;
}

bool StoreCommunicator::read_group(int group) {
  std::vector<int> unread;
  std::vector<std::string> names;
  for (int rank = begin_of(group); rank < end_of(group); ++rank) {
    if (found_[static_cast<size_t>(rank)]) continue;
    unread.push_back(rank);
    names.push_back(name_of(rank));
  }
  std::vector<std::optional<Bytes>> messages = store_->get_all(names);
  bool all = true;
  for (size_t i = 0; i < unread.size(); ++i) {
    if (!messages[i]) next_rank_ = unread[i];
    all = all && messages[i];
    found_[static_cast<size_t>(unread[i])] = std::move(messages[i]);
  }
  return all;
}

// ---- Joined messages

bool StoreCommunicator::is_joined(int group) {
  if (!joins_ || !store_->exist(std::vector{group_name(group)}).front()) return false;
  std::fill(seen_.begin() + begin_of(group), seen_.begin() + end_of(group), true);
  return true;
}

std::optional<std::vector<Bytes>> StoreCommunicator::split(int group,
                                                           const std::optional<Bytes>& bytes) {
  if (!bytes) return std::nullopt;
  const std::string name = group_name(group);
  std::vector<Bytes> messages = split_messages(*bytes, store_->file_of(name));
  const auto ranks = static_cast<size_t>(end_of(group) - begin_of(group));
  if (messages.size() == ranks) return messages;
  throw Error(ErrorCode::kCorrupt, "the file has " + std::to_string(messages.size()) +
                                       " receipts for " + std::to_string(ranks) + " ranks")
      .with_file(store_->file_of(name));
}

std::optional<Bytes> StoreCommunicator::joined_message_of(int rank) {
  if (!joins_) return std::nullopt;
  const int group = rank / group_size_;
  auto messages = split(group, store_->get(group_name(group)));
  if (!messages) return std::nullopt;
  return std::move((*messages)[static_cast<size_t>(rank - begin_of(group))]);
}

bool StoreCommunicator::complete(int group, Deadline deadline, const Before& before) {
  if (is_joined(group)) return true;
  const bool is_done = all_are_there(group) && join(group, deadline, before);
  return is_done || is_joined(group);  // they may have been joined and removed
}

bool StoreCommunicator::join(int group, Deadline deadline, const Before& before) {
  if (!read_group(group)) return false;
  const auto begin = found_.begin() + begin_of(group), end = found_.begin() + end_of(group);
  if (before) before(begin_of(group), {begin, end});
  if (!joins_) return true;
  decide(*store_, group_name(group), join_messages({begin, end}), deadline);
  std::fill(begin, end, std::nullopt);
  if (removes_) store_->remove(names_of(group));
  return true;
}

// The mark stays: who comes late must not leave it again.
bool StoreCommunicator::join_group(Deadline deadline, const Before& before) {
  const int group = own_group();
  const Bytes mine = to_bytes(std::to_string(rank_));
  return joins_ && all_are_there(group) &&
         decide(*store_, mark_name(group), mine, deadline) == mine && join(group, deadline, before);
}

bool StoreCommunicator::others_are_joined() {
  for (int group = 0; group < groups(); ++group) {
    if (group != own_group() && !is_joined(group)) return false;
  }
  return true;
}

bool StoreCommunicator::is_complete(Deadline deadline, const Before& before) {
  if (joins_ && std::exchange(has_left_, false)) {
    return join_group(deadline, before) && others_are_joined();
  }
  for (int i = 0; i < groups(); ++i) {
    const int group = (next_group_ + i) % groups();
    if (complete(group, deadline, before)) continue;
    next_group_ = group;
    return false;
  }
  return true;
}

std::optional<std::vector<Bytes>> StoreCommunicator::take() {
  std::vector<Bytes> messages;
  std::vector<std::string> names;
  for (int group = 0; joins_ && group < groups(); ++group) names.push_back(group_name(group));
  std::vector<std::optional<Bytes>> joined = store_->get_all(names);
  for (size_t group = 0; group < joined.size(); ++group) {
    auto of_group = split(static_cast<int>(group), std::exchange(joined[group], std::nullopt));
    if (!of_group) return std::nullopt;
    std::move(of_group->begin(), of_group->end(), std::back_inserter(messages));
  }
  for (std::optional<Bytes>& one : found_) {
    if (!joins_) messages.push_back(std::move(one).value());
  }
  found_.assign(found_.size(), std::nullopt);
  return messages;
}

std::optional<Bytes> StoreCommunicator::message_of(int rank) {
  if (auto message = joined_message_of(rank)) return message;
  if (auto message = store_->get(name_of(rank))) return message;
  return joined_message_of(rank);
}

std::vector<int> StoreCommunicator::missing(bool of_all) {
  std::vector<int> found;
  for (int group = 0; group < groups() && (of_all || found.empty()); ++group) {
    if (is_joined(group)) continue;
    const std::vector<std::string> names = names_of(group);
    const std::vector<bool> there = store_->exist(names), again = store_->exist(names);
    std::vector<int> of_group;
    for (size_t i = 0; i < names.size(); ++i) {
      const int rank = begin_of(group) + static_cast<int>(i);
      if (!there[i] && !again[i] && !has(rank)) of_group.push_back(rank);
    }
    if (of_group.empty() || is_joined(group)) continue;
    found.insert(found.end(), of_group.begin(), of_group.end());
  }
  return found;
}

}  // namespace tilestone
