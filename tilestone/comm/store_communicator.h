// StoreCommunicator: how ranks meet that exchange no messages. They leave short messages under
// names at one place: files at a location, or a map.
//
//  1. Verdict. What was left first under a name counts for all: decide() returns that. Whatever a
//  request answered, what is under the name then counts: a
//     request whose answer was lost may have been done, and one that was repeated may find its own
//     message there. A request that is done after its error was reported comes first or is late,
//     like that of another process.
//  2. Gather. Each rank leaves one message under its number, which is a verdict: a rank that was
//     restarted finds its message there. Who looks for the messages looks for one that is missing
//     at a time. In a world of more than Tree::most_names ranks, about the square root of the ranks
//     are a group. A rank that has left its message looks once whether those of its group are all
//     there. If so, it leaves a mark; the first one joins the messages under the group's name.
//     Others that gather join what is not joined, as its rank may have died: the same bytes. So
//     nobody looks for more names than those of a group and of the groups, who gathers reads the
//     groups' messages, and of ranks that come together one reads those of its group.
//
// A crash at any point leaves messages that are whole. They count as long as they are there, and
// the same call by another process continues from them. Only the messages of a group that was
// joined are removed here, if the caller wants that (Tree::removes): then a rank looks for its
// group's message before and after it leaves its own, so that it finds the one that counts.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"

namespace tilestone {

// A place for messages. A message is whole or not there. Names have components of letters, digits
// and '-', with '/' between them. Failures are Errors. Used by one thread at a time; other
// processes use the same place.
class MessageStore {
 public:
  virtual ~MessageStore() = default;
  // Leaves a message unless there is one under the name. Returns whether this call has left it; a
  // request that was repeated may answer that it has not. What is there is then as durable as the
  // place makes messages. A place without such a condition replaces what is there: then names that
  // one process alone uses still work.
  virtual bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) = 0;
  virtual std::optional<Bytes> get(const std::string& name) = 0;  // nullopt: there is none
  virtual std::vector<bool> exist(std::span<const std::string> names) = 0;
  // The same as get() and exist() for many names of one group, where requests are slow.
  virtual std::vector<std::optional<Bytes>> get_all(std::span<const std::string> names);
  virtual bool finds_many() const { return false; }  // exist() costs as much as for one name
  // A name without a message is no failure.
  virtual void remove(std::span<const std::string> names) = 0;
  virtual std::string file_of(const std::string& name) const { return name; }  // for errors
};

// Leaves `mine` unless there is a message under the name. Returns the one that counts. If it
// throws, `mine` may have been left, or may still be. `was_first`: set to whether this call has
// left it, as far as the answers say; true if an answer is lost.
Bytes decide(MessageStore& store, const std::string& name, ByteView mine, Deadline deadline,
             bool* was_first = nullptr);

// The message of a group. Error(kCorrupt) names the file.
Bytes join_messages(std::span<const std::optional<Bytes>> messages);
std::vector<Bytes> split_messages(ByteView bytes, const std::string& file);

// One process's end. Used by one thread at a time.
class StoreCommunicator {
 public:
  struct Tree {
    int most_names = 256;  // a world of more ranks has groups
    bool removes = false;  // the messages of single ranks, once they are joined
  };
  // `rank`: -1 for a process that only gathers.
  StoreCommunicator(std::shared_ptr<MessageStore> store, int rank, int size, Tree tree);

  // Leaves this rank's message. Returns the one that counts: `mine`, or one that was left before.
  Bytes leave(ByteView mine, Deadline deadline);
  // Instead of leave(), for the one rank that gathers.
  void keep(Bytes mine);
  // Called before a process that has found all messages of a group joins them, with its first rank.
  using Before = std::function<void(int first, std::span<const std::optional<Bytes>> messages)>;
  // To be called once after leave(), if there are groups. Joins the messages of this rank's group
  // if all are there and no other rank does. Returns whether this rank has joined them.
  bool join_group(Deadline deadline, const Before& before = {});
  // Whether all messages are there. Joins the groups that are not joined, this rank's first. Looks
  // until a message is missing, and there first the next time. The first call after a leave() is
  // join_group(): false if another rank joins this one's group, or a group is not joined yet.
  bool is_complete(Deadline deadline, const Before& before = {});
  // The messages by rank, once is_complete(); then this object has found none. nullopt: a group is
  // not joined, or its message was removed since.
  std::optional<std::vector<Bytes>> take();
  // The message of a rank that counts; nullopt: there is none.
  std::optional<Bytes> message_of(int rank);
  // Whether this process has seen that the rank has left its message.
  bool has(int rank) const { return seen_[static_cast<size_t>(rank)]; }
  // The ranks without a message, looked for by name: of all groups, or of the first that lacks one.
  // Leaves out those whose message this process has, and those that report during the call.
  std::vector<int> missing(bool of_all);

  std::string name_of(int rank) const;
  std::string file_of(int rank) const { return store_->file_of(name_of(rank)); }
  // Of what ranks leave for their groups. None in a world without groups.
  std::vector<std::string> names_of_groups() const;

 private:
  int groups() const { return (size_ + group_size_ - 1) / group_size_; }
  int own_group() const { return rank_ / group_size_; }
  int begin_of(int group) const { return group * group_size_; }
  int end_of(int group) const;
  std::vector<std::string> names_of(int group) const;
  static std::string group_name(int group) { return std::to_string(group) + "/all"; }
  static std::string mark_name(int group) { return std::to_string(group) + "/joiner"; }
  bool is_joined(int group);  // then its ranks have left their messages
  bool others_are_joined();   // all groups but this rank's
  bool all_are_there(int group);
  bool read_group(int group);
  bool join(int group, Deadline deadline, const Before& before);  // once all are there
  bool complete(int group, Deadline deadline, const Before& before);
  std::optional<std::vector<Bytes>> split(int group, const std::optional<Bytes>& bytes);
  std::optional<Bytes> joined_message_of(int rank);

  const std::shared_ptr<MessageStore> store_;
  const int rank_, size_;
  const bool joins_, removes_;
  bool has_left_ = false;  // leave() was called, and is_complete() not since then
  const int group_size_;
  std::vector<std::optional<Bytes>> found_;  // by rank; of a joined group: forgotten
  std::vector<bool> seen_;                   // by rank
  int next_group_;                           // where to look first for a missing message
  int next_rank_;                            // likewise in its group
};

}  // namespace tilestone
