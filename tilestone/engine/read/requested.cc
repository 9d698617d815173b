#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/read/everything_internal.h"
#include "tilestone/engine/read/missing_internal.h"
#include "tilestone/engine/read/requested_internal.h"
#include "tilestone/engine/read/subtrees_internal.h"
#include "tilestone/engine/read/targets_internal.h"
#include "tilestone/format/dialect/dialect.h"

namespace tilestone::engine {

Requested::Requested(const StateDict* wanted, const Opened& opened, const LoadOptions& options,
                     std::optional<Value> common, const std::vector<Path>& subtrees)
    : wanted_(wanted) {
  if (wanted == nullptr) {
    items_ = all_items(opened.metadata);
  } else {
    const Value* shared = common ? &*common : nullptr;
    plain_ = is_plain(*wanted);
    built_ = plain_ ? *wanted : build_factories(*wanted);
    built_ = with_subtrees(std::move(built_), subtrees, opened.metadata);
    built_ = as_stored(std::move(built_), opened.metadata, as_objects_);
    std::set<std::string> second_names;
    if (opened.dialect->has_replica_names()) second_names = rename_replicas(opened.metadata);
    if (keeps_some(options)) find_differences(opened, options, shared, second_names);
    built_ = with_memory(std::move(built_), findings_.kept);
    if (!plain_) requested_ = drop_nonpersistent(built_);
    items_ = opened.dialect->wanted_items(plain_ ? built_ : requested_, shared);
  }
  items_.common = std::move(common);
}

std::set<std::string> Requested::rename_replicas(const Metadata& stored) {
  std::set<std::string> old_names = ask_for_plain_keys(built_, stored);
  for (const std::string& name : old_names) {
    replicas_.emplace(key_of_replica(name), rank_of_replica(name));
  }
  return old_names;
}

void Requested::find_differences(const Opened& opened, const LoadOptions& options,
                                 const Value* common, const std::set<std::string>& second_names) {
  const Items items =
      opened.dialect->wanted_items(plain_ ? built_ : drop_nonpersistent(built_), common);
  findings_ = find_kept(items, opened.metadata, options);
  if (keeps()) expect_kept_data(*wanted_, built_, findings_.kept);
  for (const std::string& name : second_names) {
    if (is_kept(std::string(key_of_replica(name)))) findings_.kept.keys.insert(name);
  }
}

std::vector<TensorItem>& Requested::begin_reading() {
  for (const TensorItem& item : items_.tensors) {
    if (keeps() && !is_kept(item.key)) read_.push_back(item);
  }
  shared_.part(read());
  return read();
}

// A key can be kept because of a tensor of another shape. Requesting it as an object is still an
// error, which reading it raises.
bool Requested::is_read(const ObjectItem& item, const Metadata& stored) const {
  return !is_kept(item.key) || stored.find_tensor(item.key) != nullptr;
}

void Requested::expect_stored(const std::vector<TensorItem>& read, const Metadata& stored,
                              const LoadOptions& options) const {
  if (wanted_ == nullptr) return;
  if (options.differences.not_in_checkpoint != Differences::Policy::kError) return;
  std::vector<std::string> objects;
  for (const ObjectItem& item : items_.objects) {
    if (is_read(item, stored)) objects.push_back(item.key);
  }
  expect_all_stored(read, objects, stored);
}

std::vector<ObjectItem*> Requested::objects_to_read(const Opened& opened,
                                                    const LoadOptions& options) {
  const auto fail_not_found = [&](const std::string& key) {
    if (opened.metadata.find_tensor(key) != nullptr) {
      throw Error(ErrorCode::kNotFound,
                  "the checkpoint has a tensor under this key, but an object is requested")
          .with_key(key)
          .with_reason(Reason::kTensorStored)
          .with_hint("request an array of the tensor's dtype and shape instead");
    }
    const bool no_common = opened.dialect->common_object().empty() || options.sharded_only;
    throw Error(ErrorCode::kNotFound, no_common
                                          ? "the object is not in the checkpoint"
                                          : "the checkpoint has this key neither in its common "
                                            "state nor as an object")
        .with_key(key)
        .with_reason(Reason::kKeyNotStored)
        .with_hint(hint_at_missing(opened.metadata, key));
  };
  std::vector<ObjectItem*> read;
  for (ObjectItem& item : items_.objects) {
    if (!is_read(item, opened.metadata)) continue;
    if (opened.metadata.find_object(item.key) == nullptr) fail_not_found(item.key);
    read.push_back(&item);
  }
  return read;
}

void Requested::expect_kinds() const {
  for (const ObjectItem& item : items_.objects) {
    const auto kind = as_objects_.find(item.key);
    if (kind != as_objects_.end()) expect_kind(item, kind->second);
  }
}

Bytes Requested::message(const Metadata& stored, const LoadOptions& options) const {
  ByteWriter writer;
  const auto policy = options.differences.not_requested;
  const bool may_leave_out = policy && *policy != Differences::Policy::kError;
  const std::vector<Path> none;
  writer.blob(left_out(may_leave_out ? none : options.complete, items_, stored));
  writer.blob(encode_findings(findings_, items_, wanted_ != nullptr, stored, options));
  return std::move(writer).take();
}

StateDict Requested::take_loaded(const Opened& opened) {
  shared_.join(read());
  if (wanted_ == nullptr) return tree_of(std::move(items_));
  StateDict loaded = opened.dialect->from_items(std::move(plain_ ? built_ : requested_), items_);
  if (plain_) return loaded;
  return merge_factories(restore_nonpersistent(std::move(loaded), built_), *wanted_);
}

LoadReport judge_requests(const std::vector<Bytes>& of_ranks, const Metadata& stored,
                          const LoadOptions& options) {
  const auto owned = [](ByteView view) { return Bytes(view.begin(), view.end()); };
  std::vector<Bytes> left, findings;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    ByteReader reader(of_ranks[rank], "the load result of rank " + std::to_string(rank));
    left.push_back(owned(reader.blob()));
    findings.push_back(owned(reader.blob()));
    reader.expect_end();
  }
  check_left_out(left, stored);
  return unite_findings(findings, stored, options);
}

}  // namespace tilestone::engine
