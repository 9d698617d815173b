#include "tilestone/engine/run/options.h"

#include <algorithm>
#include <cctype>
#include <mutex>
#include <string_view>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/format/torch_save/torch_save.h"
#include "tilestone/storage/object_store.h"
#include "tilestone/storage/one_file.h"
#include "tilestone/storage/posix_storage.h"

namespace tilestone {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what).with_file(path);
}

std::string expand_home(const std::string& path) {
  if (path.front() != '~') return path;
  const size_t end = std::min(path.find('/'), path.size());
  const std::string home = home_directory(path.substr(1, end - 1));
  if (home.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the home directory of \"" + path.substr(0, end) + "\" is not known")
        .with_file(path)
        .with_hint("write the absolute path, or \"./" + path.substr(0, end) +
                   "\" for a directory of that name");
  }
  return home + path.substr(end);
}

std::string absolute(const std::string& path) {
  if (path.empty()) refuse(path, "the path of a checkpoint is empty");
  if (path.find('\0') != std::string::npos) refuse(path, "the path contains a NUL character");
  engine::refuse_url(path);
  if (is_store_url(path)) return path;
  std::error_code error;
  const fs::path whole = fs::absolute(expand_home(path), error);
  if (!error) return whole.string();
  throw Error(ErrorCode::kIo, "cannot find the working directory that a relative path starts from")
      .with_file(path)
      .with_errno(error.value());
}

std::shared_ptr<Storage> directory_at(const std::string& path, const PosixOptions& options) {
  return is_store_url(path) ? object_store(path) : posix_storage(path, options);
}

// A directory or prefix, or a file of a kind that is opened by itself.
std::shared_ptr<Storage> storage_at(const std::string& path, const PosixOptions& options) {
  const fs::path file(path);
  const std::string name = file.filename().string();
  if (!name.ends_with(".safetensors") && !is_torch_save_name(name)) {
    return directory_at(path, options);
  }
  auto directory = directory_at(file.parent_path().string(), options);
  std::error_code error;
  const bool is_file =
      is_store_url(path) ? directory->stat(name).has_value() : fs::is_regular_file(path, error);
  if (!is_file) return directory_at(path, options);
  return one_file(std::move(directory), name,
                  is_torch_save_name(name) ? std::string(kTorchSaveMark) : "");
}

std::string hint_for_scheme(const std::string& scheme) {
  if (scheme == "file") return "write the path without file://";
  if (scheme == "s3") return "pass the URL as text, because pathlib takes a slash away";
  return "mount the storage, or copy the checkpoint to a directory";
}

}  // namespace

bool engine::is_url(const std::string& path) {
  const size_t slash = path.find('/');
  return slash != std::string::npos && slash >= 3 && path[slash - 1] == ':';
}

void engine::refuse_url(const std::string& path) {
  if (!is_url(path)) return;
  const std::string scheme = path.substr(0, path.find('/') - 1);
  if (is_store_url(path)) return check_store_url(path);
  throw Error(ErrorCode::kUnsupported, "the path is a URL of the scheme \"" + scheme +
                                           "\", but a checkpoint must be a directory of a file "
                                           "system, or s3://bucket/prefix")
      .with_file(path)
      .with_hint(hint_for_scheme(scheme));
}

struct Location::State {
  std::string path;
  PosixOptions options;
  std::mutex mutex;
  std::shared_ptr<Storage> storage;
  bool given = false;  // constructed from a storage, not from a path

  // Whether the path is one of the file system.
  bool is_file_path() const { return !given && !is_store_url(path); }
};

Location::Location(const std::string& path) : Location(path, PosixOptions()) {}

Location::Location(const std::string& path, const PosixOptions& options)
    : state_(std::make_shared<State>()) {
  state_->path = path;
  state_->options = options;
}

Location::Location(std::shared_ptr<Storage> storage) : state_(std::make_shared<State>()) {
  state_->storage = std::move(storage);
  state_->given = true;
}

const std::shared_ptr<Storage>& Location::shared() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->storage == nullptr) {
    if (state_->given) refuse("", "the location was made without a storage (a null pointer)");
    state_->storage = storage_at(absolute(state_->path), state_->options);
  }
  return state_->storage;
}

std::string Location::describe() const { return storage().describe(); }

bool Location::has_files() const { return !storage().list().empty(); }

std::string Location::identity() const {
  if (state_->given) return describe();
  if (is_store_url(state_->path)) return object_store(state_->path)->describe();
  std::string normal = fs::path(describe()).lexically_normal().string();
  while (normal.size() > 1 && normal.back() == '/') normal.pop_back();
  return normal;
}

std::string Location::resolved_identity() const {
  const std::string unresolved = identity();
  if (!state_->is_file_path()) return unresolved;
  constexpr int kMaxLinks = 40;  // as Linux
  std::error_code error;
  fs::path path = unresolved;
  for (int links = 0; links < kMaxLinks && !error; ++links) {
    path = fs::weakly_canonical(path, error);
    // A link that leads to nothing yet stays the last component.
    if (error || !fs::is_symlink(fs::symlink_status(path, error))) break;
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return error && error != std::errc::no_such_file_or_directory ? unresolved : path.string();
}

Location Location::within(const std::string& name) const {
  if (state_->given) return Location(shared()->child(name));
  if (!state_->is_file_path()) return Location(identity() + "/" + name);
  return Location(state_->path.empty() ? "" : state_->path + "/" + name, state_->options);
}

Location Location::following_links() const {
  if (!state_->is_file_path()) return *this;
  PosixOptions options = state_->options;
  options.links = PosixOptions::Links::kAll;
  return Location(state_->path, options);
}

Location Location::until(const Deadline& deadline) const {
  Location same(shared()->until(deadline));
  same.state_->path = state_->path;
  same.state_->options = state_->options;
  same.state_->given = state_->given;
  return same;
}

std::string Location::identity_or_empty() const noexcept {
  try {
    return identity();
  } catch (...) {
    return {};
  }
}

}  // namespace tilestone
