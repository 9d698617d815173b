#include "tilestone/engine/fast_tier/step_url_internal.h"

#include <map>
#include <mutex>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/object_store.h"

namespace tilestone::engine {
namespace {

const std::string kScheme = "tilestone-hosts";

std::mutex urls_mutex;  // guards the following
std::map<std::string, std::shared_ptr<Storage>>& storages() {
  static auto* const all = new std::map<std::string, std::shared_ptr<Storage>>();
  return *all;
}

// The same description on every rank, whatever each host's directory is called.
std::shared_ptr<Storage> opened(const std::string& url) {
  const std::string save_id = url.substr(kScheme.size() + 3);
  const std::lock_guard lock(urls_mutex);
  const auto found = storages().find(save_id);
  if (found == storages().end()) {
    throw Error(ErrorCode::kNotFound, "the step is open no more").with_file(url);
  }
  return found->second;
}

}  // namespace

StepUrl::StepUrl(std::string save_id, std::shared_ptr<Storage> storage)
    : save_id_(std::move(save_id)) {
  static const bool registered = [] {
    register_store(kScheme, opened);
    return true;
  }();
  static_cast<void>(registered);
  const std::lock_guard lock(urls_mutex);
  storages()[save_id_] = std::move(storage);
}

StepUrl::~StepUrl() {
  const std::lock_guard lock(urls_mutex);
  storages().erase(save_id_);
}

std::string StepUrl::url() const { return kScheme + "://" + save_id_; }

}  // namespace tilestone::engine
