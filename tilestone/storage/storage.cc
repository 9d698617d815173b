#include "tilestone/storage/storage.h"

#include <algorithm>
#include <cerrno>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/storage/available_memory_internal.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

// Removes the temporary file after a publish has failed. If that fails too, it is only logged: the
// caller must get the error that made the publish fail.
void discard_temporary(Storage& storage, const std::string& temp_name) {
  or_log(LogLevel::kDebug, "a temporary file was not removed", [&] { storage.remove(temp_name); });
}

}  // namespace

bool is_file_name(std::string_view name) {
  try {
    check_file_name(std::string(name));
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::pair<std::string_view, std::string_view> split_name(std::string_view name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string_view::npos) return {std::string_view(), name};
  return {name.substr(0, slash), name.substr(slash + 1)};
}

void check_directory_name(std::string_view name) {
  if (!name.empty()) check_file_name(name);
}

void check_apart(const std::string& a, const std::string& b, const std::string& what) {
  check_file_name(a);
  check_file_name(b);
  if ((a + "/").starts_with(b + "/") || (b + "/").starts_with(a + "/")) {
    throw Error(ErrorCode::kInvalidArgument, what + ": they are the same or one contains the other")
        .with_file(a);
  }
}

namespace {

// Calls `remove`. Error(kNotFound) counts as success.
template <typename Remove>
void remove_if_there(const Remove& remove) {
  try {
    remove();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
  }
}

// The directories of the tree, each after those in it.
std::vector<std::string> directories_within(Storage& tree) {
  std::vector<std::string> directories = tree.list_directories();
  for (size_t i = 0; i < directories.size(); ++i) {
    for (std::string& inner : tree.list_directories(directories[i] + "/")) {
      directories.push_back(std::move(inner));
    }
  }
  std::ranges::reverse(directories);
  return directories;
}

// Removes everything in the tree. A name in it may be too long in a storage of a directory above.
void empty_tree(Storage& tree, Directories& own) {
  tree.remove(tree.list());
  for (const std::string& directory : directories_within(tree)) {
    remove_if_there([&] { own.remove(directory); });
  }
}

bool contains_name(const std::vector<std::string>& sorted, const std::string& name) {
  return std::binary_search(sorted.begin(), sorted.end(), name);
}

}  // namespace

void Storage::tidy(const std::string& name) noexcept {
  or_log(LogLevel::kDebug, "a directory stays", [&] {
    Directories* const own = directories();
    if (own == nullptr || !contains_name(list_directories(name), name)) return;  // not a link
    const auto tree = child(name);
    for (const std::string& inner : directories_within(*tree)) {
      remove_if_there([&] { tree->directories()->remove(inner); });
    }
    remove_if_there([&] { own->remove(name); });
  });
}

void Storage::remove_tree(const std::string& name) {
  Directories* const own = directories();
  if (own == nullptr) return remove(list(name + "/"));
  const auto info = stat(name);
  if (!info || info->regular) {
    throw Error(info ? ErrorCode::kIo : ErrorCode::kNotFound, "cannot remove a directory")
        .with_file(name)
        .with_errno(info ? ENOTDIR : ENOENT);
  }
  if (contains_name(list_directories(name), name)) {  // not a link
    const auto tree = child(name);
    empty_tree(*tree, *tree->directories());
  }
  remove_if_there([&] { own->remove(name); });
}

uint64_t Storage::available_cache() const { return facts().page_cache ? available_memory() : 0; }

uint64_t Storage::prefetch(std::span<const ReadOp> ops, ReadOptions options) {
  if (!facts().shared_cache) return 0;
  uint64_t fetched = 0;
  options.prefetched = &fetched;
  read(ops, options, {});
  return fetched;
}

std::shared_ptr<Storage> Storage::child(const std::string& name) {
  check_file_name(name);
  return view(name, std::nullopt);
}

std::shared_ptr<Storage> Storage::view(const std::string& directory,
                                       const std::optional<Deadline>&) {
  if (directory.empty()) return shared_from_this();
  throw Error(ErrorCode::kUnsupported, "there are no folders in " + describe())
      .with_file(directory);
}

void Storage::discard_unfinished(const std::string& prefix,
                                 const std::function<bool(const std::string&)>& goes) {
  std::vector<std::string> names = listing(prefix, Depth::kUnfinished).files;
  std::erase_if(names, [&](const std::string& name) { return !goes(name); });
  if (!names.empty()) remove_files(names, {.unfinished = true});
}

void Storage::settle(const std::string& name) {
  check_directory_name(name);
  if (Directories* const own = directories()) own->settle(name);
}

std::optional<StorageEntry> Storage::parent() {
  Directories* const own = directories();
  return own == nullptr ? std::nullopt : own->parent();
}

std::shared_ptr<Storage> Storage::held() {
  if (Directories* const own = directories()) {
    if (auto open = own->held()) return open;
  }
  return shared_from_this();
}

bool Storage::stands() {
  const Directories* const own = directories();
  return own == nullptr || own->stands();
}

Bytes read_file(Storage& storage, const std::string& name, uint64_t max_size) {
  const auto file = storage.open(name);
  if (file->size() > max_size) {
    throw Error(ErrorCode::kCorrupt, "the file has " + std::to_string(file->size()) +
                                         " bytes, but at most " + std::to_string(max_size) +
                                         " are allowed")
        .with_file(name);
  }
  Bytes bytes(file->size());
  if (bytes.empty()) return bytes;
  const ReadOp op{file.get(), 0, bytes.size(), bytes.data()};
  storage.read({&op, 1}, {}, [](size_t, ByteView) {});
  return bytes;
}

namespace {

// Without bytes there is nothing that a crash could leave in part.
bool put_empty(Storage& storage, const std::string& name) {
  try {
    storage.create(name)->close();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    return false;
  }
  storage.settle(std::string(parent_name(name)));
  return true;
}

}  // namespace

// The protocol, and what `name` holds after a crash during or after each step:
//   1. create temp_name, which nobody else reads        the old content; temp_name is a leftover
//                                                       with any content
//   2. append all bytes                                 the same
//   3. sync: bytes and length are durable               the same
//   4. rename temp_name to name                         the old or the new content, depending on
//                                                       whether the directory reached the disk;
//                                                       step 3 makes the new content complete
//   5. sync the directory of name                       the new content, once this has returned
// The rename is atomic, so a `name` that existed before is never absent. Step 3 is necessary: a
// file system may make the rename durable before the bytes of the file.
std::optional<std::string> Storage::put_for_tag(const std::string& name, ByteView bytes,
                                                const Condition& condition,
                                                const std::string& scratch, Deadline deadline) {
  check_file_name(name);
  const auto answer = [](bool done) {
    return done ? std::optional<std::string>("") : std::nullopt;
  };
  if (!condition.tag().empty()) {
    throw Error(ErrorCode::kUnsupported, "a file can't be replaced here only if it has a tag")
        .with_file(name);
  }
  if (bytes.empty() && condition.is_absent()) return answer(put_empty(*this, name));
  prepare_put(scratch, bytes, deadline);
  try {
    const bool done = put_prepared(name, bytes, condition, scratch, deadline);
    if (!done) discard_temporary(*this, scratch);
    return answer(done);
  } catch (const Error&) {
    discard_temporary(*this, scratch);
    throw;
  }
}

bool Storage::link(const StorageEntry&, const std::string&, const Deadline&) {
  log_once(LogLevel::kWarning,
           "files can't be linked to a storage of another kind or place; they are written");
  return false;
}

void Storage::publish(const std::string& name, const std::string& temp_name, ByteView bytes,
                      bool replace, Deadline deadline) {
  if (put(name, bytes, replace ? Condition::always() : Condition::absent(), temp_name, deadline))
    return;
  throw Error(ErrorCode::kAlreadyExists, "cannot make a file: its name exists")
      .with_file(name)
      .with_errno(EEXIST);
}

void Storage::rename(const std::string& from, const std::string& to, bool replace) {
  if (Directories* const own = directories()) return own->rename_file(from, to, replace);
  throw Error(ErrorCode::kUnsupported, "this storage renames nothing").with_file(from);
}

void Storage::make_root() {
  if (Directories* const own = directories()) own->make("");
}

void Storage::copy_permissions(const std::string& name, const std::string& like) {
  if (Directories* const own = directories()) own->copy_permissions(name, like);
}

bool Storage::put_message(const std::string& name, ByteView bytes, const std::string& scratch,
                          std::unique_ptr<WritableFile> begun, Deadline deadline) {
  if (!facts().renames) return put(name, bytes, Condition::absent(), scratch, deadline);
  try {
    if (begun == nullptr) begun = create(scratch, bytes.size());
    if (!bytes.empty()) begun->append(bytes);
    begun->close();
  } catch (const Error&) {
    discard_temporary(*this, scratch);
    throw;
  }
  try {
    rename(scratch, name, false);
    return true;
  } catch (const Error& error) {
    discard_temporary(*this, scratch);
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    return false;
  }
}

void Storage::make_file(const std::string& name, ByteView bytes, Deadline deadline) {
  const auto file = create(name, bytes.size(), deadline);
  file->append(bytes);
  file->sync(deadline);
  file->close();
}

// Steps 1 to 3.
void Storage::prepare_put(const std::string& scratch, ByteView bytes, Deadline deadline) {
  try {
    make_file(scratch, bytes, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) discard_temporary(*this, scratch);
    throw;
  }
}

// Steps 4 and 5.
bool Storage::put_prepared(const std::string& name, ByteView bytes, const Condition& condition,
                           const std::string& scratch, Deadline deadline) {
  check_file_name(name);
  if (!facts().renames) return put(name, bytes, condition, scratch, deadline);
  if (deadline.expired()) {
    throw Error(ErrorCode::kTimeout, "the deadline passed before a file was published")
        .with_file(name);
  }
  try {
    rename(scratch, name, condition.is_always());
  } catch (const Error& error) {
    if (condition.is_absent() && error.code() == ErrorCode::kAlreadyExists) return false;
    throw;
  }
  settle(std::string(parent_name(name)));
  return true;
}

}  // namespace tilestone
