#include "tilestone/storage/s3/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/per_process.h"
#include "tilestone/storage/lease.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/object_store.h"
#include "tilestone/storage/s3/bucket_internal.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

using Known = Bucket::Known;

constexpr std::string_view kScheme = "s3://";
constexpr uint64_t kMaxKeyBytes = 1024;
// An ETag that no object has.
constexpr const char* kNoTag = "\"00000000000000000000000000000000\"";

FileInfo info_of(uint64_t size,
                 const std::optional<std::chrono::system_clock::time_point>& modified) {
  FileInfo info = {.size = size};
  if (modified) {
    info.modified = std::chrono::duration<double>(modified->time_since_epoch()).count();
  }
  return info;
}

class S3Store : public Storage {
 public:
  S3Store(std::shared_ptr<Bucket> bucket, const std::string& prefix)
      : bucket_(std::move(bucket)), root_(prefix.empty() ? "" : prefix + "/") {}

  StorageFacts facts() const override {
    StorageFacts facts;
    facts.description = std::string(kScheme) + bucket_->name;
    if (!root_.empty()) facts.description += "/" + root_.substr(0, root_.size() - 1);
    facts.costs_requests = true;
    facts.read_costs = kStoreReadCosts;
    facts.put_if_absent = bucket_->put_if_absent != Known::kNo;
    facts.put_if_tag = bucket_->put_if_tag != Known::kNo;
    facts.lease_period = lease_period();
    facts.max_name_bytes = kMaxKeyBytes - std::min<uint64_t>(kMaxKeyBytes, root_.size());
    return facts;
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline& deadline) override {
    return new_upload(bucket_, key(name), name, expected_size, deadline);
  }
  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    return open_object(bucket_, key(name), name, call_deadline(until_));
  }
  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    read_objects(*bucket_, root_, ops, options, done);
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    const auto found = bucket_->client.head(key(name), false, call_deadline(until_)).wait();
    if (!found) return std::nullopt;
    FileInfo info = info_of(found->size, found->modified);
    info.tag = found->etag;
    if (found->age) info.least_age = found->age->count() - 1;  // both times are in whole seconds
    return info;
  }

  Listing listing(const std::string& prefix, Depth depth) override {
    ListRequest request = {.prefix = root_ + prefix};
    if (depth == Depth::kLevel) request.delimiter = "/";
    if (depth == Depth::kUnfinished) return unfinished(prefix);
    std::map<std::string, FileInfo> files;
    Listing found;
    do {
      const ListPage page = bucket_->client.list(request, call_deadline(until_)).wait();
      for (const Listed& each : page.objects) {
        const std::string name = name_of(each.key);
        if (is_file_name(name)) files.emplace(name, info_of(each.size, each.modified));
      }
      for (const std::string& each : page.prefixes) {
        std::string name = name_of(each.substr(0, each.size() - 1));
        if (is_file_name(name)) found.directories.push_back(std::move(name));
      }
      request.next = page.next;
      if (depth == Depth::kAtOnce && !page.next.empty()) return {};
    } while (!request.next.empty());
    for (auto& [name, info] : files) {
      found.files.push_back(name);
      found.infos.push_back(std::move(info));
    }
    std::ranges::sort(found.directories);
    found.is_whole = depth == Depth::kAtOnce;
    return found;
  }

  std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                         const Condition& condition, const std::string& scratch,
                                         Deadline deadline) override {
    const std::string to = key(name);
    const Deadline end = bounded(deadline);
    if (!condition.is_always()) find_conditions(key(scratch), end);
    if (!condition.tag().empty()) expect_tags(name);
    if (condition.is_absent() && bucket_->put_if_absent == Known::kNo) {
      if (stat(name)) return std::nullopt;
      return put_one(to, bytes, Condition::always(), end);
    }
    return put_one(to, bytes, condition, end);
  }

  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    if (how.if_tag) return remove_one(key(names.front()), how);
    if (how.unfinished) return discard_uploads({names.begin(), names.end()});
    std::optional<NotDeleted> first;
    for (size_t at = 0; at < names.size(); at += kMaxKeysToRemove) {
      std::vector<std::string> keys;
      for (size_t i = at; i < std::min(names.size(), at + kMaxKeysToRemove); ++i)
        keys.push_back(key(names[i]));
      const auto refused = bucket_->client.remove(keys, call_deadline(until_)).wait();
      if (!refused.empty() && !first) first = refused.front();
    }
    if (!first) return true;
    throw Error(ErrorCode::kIo, fmt::format("cannot remove s3://{}/{}: {}: {}", bucket_->name,
                                            first->key, first->code, first->message))
        .with_file(first->key.substr(root_.size()))
        .with_errno(EACCES);
  }

  bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline) override {
    const auto* const other = dynamic_cast<const S3Store*>(from.storage.get());
    if (other == nullptr) return Storage::link(from, name, deadline);
    const std::string source = other->key(from.name);
    const auto info = other->bucket_->client.head(source, false, bounded(deadline)).wait();
    if (!info || info->size > kMaxCopied) return false;
    try {
      return bucket_->client.copy(other->bucket_->name, source, key(name), bounded(deadline))
          .wait()
          .has_value();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported && error.sys_errno() != EACCES) throw;
      log_once(LogLevel::kWarning,
               fmt::format("objects are not copied from s3://{} to s3://{}, they are written: {}",
                           other->bucket_->name, bucket_->name, error.message()));
      return false;
    }
  }

  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override {
    return claim_lease(shared_from_this(), name, lease_period(), patience);
  }
  bool is_claimed(const std::string& name) override {
    return is_leased(*this, name, lease_period());
  }

  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>& deadline) override {
    auto part = std::make_shared<S3Store>(bucket_, without_slash(root_ + directory));
    part->until_ = deadline.value_or(until_);
    return part;
  }

 private:
  bool remove_one(const std::string& key, const FileRemoval& how) {
    Client& client = bucket_->client;
    const Deadline end = bounded(how.deadline.value_or(Deadline::never()));
    return (how.is_alone ? client.remove_own(key, *how.if_tag, end)
                         : client.remove_if(key, *how.if_tag, end))
        .wait();
  }

  void for_each_upload(const std::string& prefix, const std::function<void(const Upload&)>& visit) {
    UploadPage page;
    do {
      page = bucket_->client.uploads(prefix, page.next, call_deadline(until_)).wait();
      std::ranges::for_each(page.uploads, visit);
    } while (page.next);
  }

  Listing unfinished(const std::string& prefix) {
    std::set<std::string> names;
    for_each_upload(root_ + prefix, [&](const Upload& each) { names.insert(name_of(each.key)); });
    std::erase_if(names, [](const std::string& name) { return !is_file_name(name); });
    return {.files = {names.begin(), names.end()}};
  }

  bool discard_uploads(const std::set<std::string>& names) {
    for_each_upload(root_, [&](const Upload& each) {
      if (names.contains(name_of(each.key)))
        bucket_->client.abort(each.key, each.id, call_deadline(until_)).wait();
    });
    return true;
  }

  std::string key(const std::string& name) const {
    check_file_name(name);
    return root_ + name;
  }

  std::string name_of(const std::string& key) const {
    return key.substr(std::min(root_.size(), key.size()));
  }

  MaybeEtag put_one(const std::string& key, ByteView bytes, const Condition& condition,
                    const Deadline& deadline) {
    return bucket_->client.put(key, {bytes}, condition, crc32(bytes), deadline).wait();
  }

  // Puts the scratch file, twice if absent and once under a tag that nothing has. Nobody else uses
  // its name, so what the second and the third put answer is the bucket's doing.
  void find_conditions(const std::string& scratch, const Deadline& deadline) {
    if (bucket_->put_if_tag != Known::kAssumed) return;
    has_condition(scratch, Condition::absent(), deadline);
    bucket_->put_if_absent = has_condition(scratch, Condition::absent(), deadline);
    bucket_->put_if_tag = has_condition(scratch, Condition::has(kNoTag), deadline);
    bucket_->client.remove({scratch}, deadline).wait();
    if (bucket_->put_if_absent == Known::kYes) return;
    log(LogLevel::kWarning,
        fmt::format("s3://{} has no conditional writes: two saves at one place at the same time go "
                    "unnoticed",
                    bucket_->name));
  }

  Known has_condition(const std::string& key, const Condition& condition,
                      const Deadline& deadline) {
    try {
      const bool has = bucket_->client.refuses(key, {}, condition, deadline).wait();
      return has ? Known::kYes : Known::kNo;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      return Known::kNo;
    }
  }

  void expect_tags(const std::string& name) const {
    if (bucket_->put_if_tag == Known::kYes) return;
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("s3://{} has no writes under the condition of a tag (If-Match)", bucket_->name))
        .with_file(name);
  }

  const std::shared_ptr<Bucket> bucket_;
  const std::string root_;  // "", or the prefix and a slash
  Deadline until_ = Deadline::never();
};

// What may change how a bucket is reached.
Environment relevant(Environment environment) {
  std::erase_if(environment, [](const auto& each) {
    const std::string& name = each.first;
    return !name.starts_with("AWS_") && !name.starts_with("TILESTONE_S3") && name != "HOME" &&
           name != "SSL_CERT_FILE" && name.find("proxy") == std::string::npos &&
           name.find("PROXY") == std::string::npos;
  });
  return environment;
}

// Never destroyed: a thread of the process may still use its connections while it exits.
struct Buckets {
  std::mutex mutex;
  std::map<std::pair<std::string, Environment>, std::shared_ptr<Bucket>> by_name;
};

std::shared_ptr<Bucket> shared_bucket(const std::string& name) {
  static auto& of_process = *new PerProcess<Buckets>([] { return std::make_unique<Buckets>(); });
  Buckets& buckets = of_process.get();
  const Environment environment = relevant(process_environment());
  const std::lock_guard lock(buckets.mutex);
  std::shared_ptr<Bucket>& bucket = buckets.by_name[{name, environment}];
  if (bucket == nullptr) bucket = std::make_shared<Bucket>(config_from(environment), name);
  return bucket;
}

}  // namespace

Url parse_url(const std::string& url) {
  const std::string rest = url.starts_with(kScheme) ? url.substr(kScheme.size()) : "";
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string prefix = rest.substr(std::min(slash + 1, rest.size()));
  if (slash > 0 && is_literal(prefix)) return {rest.substr(0, slash), without_slash(prefix)};
  throw Error(ErrorCode::kInvalidArgument, "this is not of the form s3://bucket/prefix")
      .with_file(url)
      .with_hint(kLiteralHint);
}

std::shared_ptr<Storage> s3_store(const Url& url) {
  return std::make_shared<S3Store>(shared_bucket(url.bucket), url.prefix);
}

std::shared_ptr<Storage> s3_store(const Url& url, Config config) {
  return std::make_shared<S3Store>(std::make_shared<Bucket>(std::move(config), url.bucket),
                                   url.prefix);
}

}  // namespace tilestone::s3
