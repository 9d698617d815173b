#include "tilestone/engine/checkpoint/verify_hashes_internal.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/sha256.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMaxHashesSize = 256u << 20;
constexpr uint64_t kPiece = 4u << 20;  // bytes that are read and hashed at once

std::optional<Damage> check_file(Storage& storage, const std::string& name,
                                 const std::string& expected) {
  const auto there = storage.stat(name);
  if (!there) return Damage{name, 0, 0, "", "is named in integrity.json, but missing"};
  const std::string found = sha256_of_file(storage, name);
  if (found == expected) return std::nullopt;
  return Damage{name, 0, there->size, "",
                "the file has the SHA-256 " + found + ", but integrity.json has " + expected};
}

}  // namespace

std::string sha256_of_file(Storage& storage, const std::string& name) {
  const auto file = storage.open(name);
  const uint64_t size = file->size();
  Bytes piece(std::min(kPiece, size));
  Sha256 hash;
  for (uint64_t at = 0; at < size; at += piece.size()) {
    const uint64_t count = std::min<uint64_t>(piece.size(), size - at);
    const ReadOp op{file.get(), at, count, piece.data()};
    storage.read({&op, 1}, {}, [](size_t, ByteView) {});
    hash.add(ByteView(piece).first(count));
  }
  return hash.hex();
}

std::vector<Damage> check_hashes(Storage& storage, const std::string& save_id, ThreadPool& threads,
                                 size_t rank, size_t ranks) {
  const std::string file(kMegatronHashes);
  if (!storage.stat(file)) return {};
  const auto hashes = read_megatron_hashes(read_file(storage, file, kMaxHashesSize));
  if (!hashes) return {Damage{file, 0, 0, "", "does not hold sha256 hashes of files"}};
  if (!hashes->save_id.empty() && hashes->save_id != save_id) {
    if (rank == 0) {
      log(LogLevel::kWarning,
          file + " of " + storage.describe() + " is of an earlier save, and is ignored");
    }
    return {};
  }
  std::vector<Damage> damages;
  std::mutex mutex;
  threads.parallel_for(hashes->files.size(), [&](size_t i) {
    if (i % ranks != rank) return;
    const auto& [name, expected] = hashes->files[i];
    std::optional<Damage> found;
    try {
      found = check_file(storage, name, expected);
    } catch (const Error& error) {
      found = Damage{name, 0, 0, "", error.message(), error.code() == ErrorCode::kUnsafe};
    }
    const std::lock_guard lock(mutex);
    if (found) damages.push_back(*std::move(found));
  });
  for (const std::string& name : rank == 0 ? storage.list_files() : std::vector<std::string>()) {
    const auto is_it = [&](const auto& one) { return one.first == name; };
    if (name == file || std::any_of(hashes->files.begin(), hashes->files.end(), is_it)) continue;
    damages.push_back({name, 0, 0, "", "is not named in integrity.json"});
  }
  return damages;
}

}  // namespace tilestone::engine
