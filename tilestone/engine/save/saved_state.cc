#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"
#include "tilestone/engine/save/saved_state_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {
namespace {

class UnkeptFile : public WritableFile {
 public:
  explicit UnkeptFile(std::string name) : name_(std::move(name)) {}
  void append(Buffer buffer) override { size_ += buffer.view().size(); }
  void append(ByteView bytes) override { size_ += bytes.size(); }
  void sync(Deadline) override {}
  void close() override {}
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  const std::string name_;
  uint64_t size_ = 0;
};

// Keeps nothing. A rank's part of a save is written here for its checksums.
class UnkeptFiles : public Storage {
 public:
  StorageFacts facts() const override { return {.description = "a comparison"}; }
  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t,
                                       const Deadline&) override {
    return std::make_unique<UnkeptFile>(name);
  }
  std::unique_ptr<ReadableFile> open(const std::string& name) override { refuse(name); }
  void read(std::span<const ReadOp>, const ReadOptions&, const ReadDone&) override { refuse(""); }
  std::optional<FileInfo> stat(const std::string&) override { return std::nullopt; }
  Listing listing(const std::string&, Depth) override { return {}; }
  bool remove_files(std::span<const std::string>, const FileRemoval&) override { return true; }
  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline&) override {
    refuse(name);
  }
  bool is_claimed(const std::string&) override { return false; }

 private:
  [[noreturn]] static void refuse(const std::string& name) {
    throw Error(ErrorCode::kInternal, "a comparison keeps no files").with_file(name);
  }
};

// What all ranks say of one key.
struct Said {
  std::set<std::string> kinds;       // path; of a tensor also dtype and shape
  std::multiset<std::string> items;  // box or length, and checksum
  bool operator==(const Said&) const = default;
};

std::string path_text(const Path& path) {
  std::string text;
  for (const PathElement& element : path) {
    text += fmt::format("{} {}\n", element.index(), key_text(element));
  }
  return text;
}

std::map<std::string, Said> said_in(const std::vector<Receipt>& receipts) {
  std::map<std::string, Said> said;
  for (const Receipt& receipt : receipts) {
    for (const Receipt::Tensor& tensor : receipt.tensors) {
      said[tensor.key].kinds.insert(fmt::format("{}{}{}", path_text(tensor.path),
                                                to_string(tensor.dtype),
                                                to_string(tensor.global_shape)));
    }
    for (const Receipt::Chunk& chunk : receipt.chunks) {
      said[receipt.tensors.at(chunk.tensor).key].items.insert(
          fmt::format("{} {}", to_string(chunk.box), chunk.at.checksums.payload_crc32));
    }
    for (const Receipt::Object& object : receipt.objects) {
      Said& of_key = said[object.key];
      of_key.kinds.insert(path_text(object.path));
      of_key.items.insert(fmt::format("{} {}", object.at.length, object.at.checksums.item_crc32));
    }
  }
  return said;
}

bool have_same_dicts(const std::vector<Receipt>& now, const std::vector<Receipt>& before) {
  const auto united = [](const std::vector<Receipt>& receipts) {
    TreeKeys keys;
    for (const Receipt& receipt : receipts) add_keys(keys, receipt.dict_keys);
    return keys;
  };
  const TreeKeys a = united(now);
  const TreeKeys b = united(before);
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& two) {
    const DictKeys& x = one.second;
    const DictKeys& y = two.second;
    return one.first == two.first && x.ints == y.ints && x.empty == y.empty && x.others == y.others;
  });
}

// `of_dialect`: the files in which the dialect keeps the common state.
std::string first_difference(const std::vector<Receipt>& receipts, const Index& of_dialect,
                             const Manifest& manifest) {
  const std::map<std::string, Said> now = said_in(receipts);
  const std::map<std::string, Said> before = said_in(manifest.receipts);
  for (const auto& [key, said] : now) {
    const auto found = before.find(key);
    if (found == before.end()) return key + " is new";
    if (found->second != said) return key + " differs";
  }
  for (const auto& [key, said] : before) {
    if (!now.contains(key)) return key + " is missing";
  }
  if (!have_same_dicts(receipts, manifest.receipts)) return "the keys of a dict differ";
  for (const IndexSum& sum : sums_of(of_dialect)) {
    const bool same =
        std::any_of(manifest.index.begin(), manifest.index.end(), [&](const IndexSum& other) {
          return other.name == sum.name && other.size == sum.size && other.xxh3 == sum.xxh3;
        });
    if (!same) return sum.name + " differs";
  }
  return "";
}

std::string compare_receipts(const SaveCall& call, const SaveShare& share,
                             const std::vector<Bytes>& payloads) {
  std::vector<Receipt> receipts;
  for (const Bytes& payload : payloads) receipts.push_back(Receipt::decode(payload));
  Found found = find_checkpoint(call.location.shared(), nullptr);
  const Opened opened = open_description(std::move(found.description), nullptr);
  if (!opened.manifest) return "it was saved without checksums";
  return first_difference(receipts, share.dialect->encode_index(share.items, *share.format),
                          *opened.manifest);
}

}  // namespace

std::string difference_from_saved(const SaveCall& call, const MadeRequest& request) {
  SavingByRounds saving(call.options.comm, "comparison with a saved step",
                        call.location.identity_or_empty(), call.deadline);
  saving.publishes = false;
  plan_step(saving, request, call.session.get());
  PlannedShare& planned = saving.planned;
  planned.share.options.reuse = std::nullopt;
  planned.storage = std::make_shared<UnkeptFiles>();
  write_step(saving, call.session ? &call.session->resources : nullptr);
  const Bytes answer = saving.rounds.run_last(
      "summing",
      [&](Deadline) {
        if (const Error* const failed = std::get_if<Error>(&*saving.written)) throw *failed;
        return std::get<Receipt>(*saving.written).encode();
      },
      [&](const std::vector<Bytes>& payloads) {
        const std::string difference = compare_receipts(call, planned.share, payloads);
        const ByteView bytes = as_bytes(difference);
        return std::vector<Bytes>(payloads.size(), Bytes(bytes.begin(), bytes.end()));
      });
  return std::string(as_text(answer));
}

}  // namespace tilestone::engine
