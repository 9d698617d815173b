// tilestone inspect: where a checkpoint came from, its files, and how one key is sharded.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <vector>

#include "tilestone/base/natural_order.h"
#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

// The limit on the rows of a printed table without --all: a large job has thousands of files, and
// thousands of shards per key.
constexpr size_t kMaxRows = 40;

size_t rows_shown(size_t rows, bool all) { return all ? rows : std::min(rows, kMaxRows); }

void print_left_out(size_t rows, size_t shown, std::string_view noun) {
  if (shown == rows) return;
  fmt::print("and {}; --all lists them\n", counted(rows - shown, fmt::format("more {}", noun)));
}

struct FileUse {
  uint64_t items = 0;
  uint64_t bytes = 0;  // of items
};

std::vector<FileUse> use_of_files(const Metadata& metadata) {
  std::vector<FileUse> uses(metadata.files.size());
  for_each_item(metadata, [&](const std::string&, const ItemLocation& at, bool) {
    ++uses[at.file].items;
    uses[at.file].bytes += at.length;
  });
  return uses;
}

// Bytes of tensors by dtype.
std::map<std::string, uint64_t> bytes_by_dtype(const Metadata& metadata) {
  std::map<std::string, uint64_t> sums;
  for (const StoredTensor& tensor : metadata.tensors) {
    sums[std::string(to_string(tensor.dtype))] +=
        static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
  }
  return sums;
}

Json location_json(const Metadata& metadata, const ItemLocation& at) {
  Json out = {{"file", metadata.files[at.file]}, {"offset", at.offset}, {"length", at.length}};
  if (at.codec == Codec::kZstd) out["codec"] = "zstd";
  if (at.checksums) out["crc32"] = fmt::format("{:08x}", at.checksums->item_crc32);
  return out;
}

bool has_manifest(const Checkpoint& checkpoint) {
  return checkpoint.save_record() && !checkpoint.metadata().rank_local;
}

// What the recorded checksums are of.
std::string checksums_text(const Metadata& metadata) {
  uint64_t items = 0, summed = 0, blocks = 0;
  const auto count = [&](const ItemLocation& at) {
    ++items;
    summed += at.checksums ? 1 : 0;
    blocks += at.checksums && at.checksums->blocks ? 1 : 0;
  };
  for (const StoredTensor& tensor : metadata.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) count(chunk.at);
  }
  for (const StoredObject& object : metadata.objects) count(object.at);
  if (summed == 0) return items == 0 ? "no items" : "no checksums";
  std::string text = "checksums of ";
  text += summed < items ? fmt::format("{} of {} items", grouped(summed), grouped(items))
                         : std::string("whole items");
  return blocks == 0 ? text : text + fmt::format(", and of the blocks of {}", grouped(blocks));
}

std::string commit_text(const Checkpoint& checkpoint) {
  if (const auto& record = checkpoint.save_record(); record && has_manifest(checkpoint)) {
    return fmt::format("manifest of {}, {}",
                       counted(static_cast<uint64_t>(record->world_size), "rank"),
                       checksums_text(checkpoint.metadata()));
  }
  if (!checkpoint.metadata().rank_local) return "none";
  const auto& record = checkpoint.save_record();
  if (!record || record->hosts.empty()) return "none (each rank wrote its own metadata)";
  return fmt::format("none (each rank wrote its own metadata); receipts of {}, {}",
                     counted(static_cast<uint64_t>(record->world_size), "rank"),
                     checksums_text(checkpoint.metadata()));
}

// "node1 (8 ranks), node2 (8 ranks)", with at most the first 8 hosts.
std::string hosts_text(const SaveRecord& record) {
  constexpr size_t kShown = 8;
  std::vector<std::pair<std::string, uint64_t>> hosts;  // in the order of their first ranks
  std::map<std::string, size_t> numbers;
  for (const std::string& host : record.hosts) {
    const auto [number, is_new] = numbers.emplace(host, hosts.size());
    if (is_new) hosts.emplace_back(host.empty() ? "unknown" : printable(host), 0);
    ++hosts[number->second].second;
  }
  std::string text;
  for (size_t i = 0; i < std::min(hosts.size(), kShown); ++i) {
    text += fmt::format("{}{} ({})", i == 0 ? "" : ", ", hosts[i].first,
                        counted(hosts[i].second, "rank"));
  }
  return hosts.size() <= kShown ? text : text + fmt::format(" and {} more", hosts.size() - kShown);
}

void print_record(const SaveRecord& record) {
  if (!record.hosts.empty()) fmt::print("hosts      {}\n", hosts_text(record));
  for (const auto& [name, value] : record.attributes) {
    fmt::print("attribute  {} = {}\n", printable(name), printable(value));
  }
}

Json whole_json(const Checkpoint& checkpoint, const std::vector<FileUse>& uses) {
  const Metadata& metadata = checkpoint.metadata();
  Json out = {{"format", checkpoint.format_name()},
              {"format_version", checkpoint.format_version()},
              {"dialect", checkpoint.dialect_name()},
              {"writer", metadata.writer},
              {"save_id", metadata.save_id},
              {"rank_local", metadata.rank_local},
              {"manifest", has_manifest(checkpoint)},
              {"tensors", metadata.tensors.size()},
              {"objects", metadata.objects.size()},
              {"has_common", checkpoint.has_common()},
              {"copies", copies_in(metadata)},
              {"copy_bytes", copy_bytes(metadata)},
              {"tensor_bytes", metadata.tensor_bytes()},
              {"bytes_by_dtype", bytes_by_dtype(metadata)}};
  if (const auto& record = checkpoint.save_record()) {
    out["hosts"] = record->hosts;
    out["attributes"] = record->attributes;
  }
  out["notes"] = metadata.notes;
  out["files"] = Json::array();
  for (size_t i = 0; i < uses.size(); ++i) {
    out["files"].push_back(
        {{"name", metadata.files[i]}, {"items", uses[i].items}, {"item_bytes", uses[i].bytes}});
  }
  return out;
}

void print_whole(const Checkpoint& checkpoint, const std::string& path) {
  const Metadata& metadata = checkpoint.metadata();
  fmt::print("location   {}\nformat     {}, version {}\ndialect    {}\nwriter     {}\n", path,
             checkpoint.format_name(), checkpoint.format_version(), checkpoint.dialect_name(),
             printable(metadata.writer));
  fmt::print("save id    {}\ncommit     {}\n",
             metadata.save_id.empty() ? "none" : printable(metadata.save_id),
             commit_text(checkpoint));
  if (const auto& record = checkpoint.save_record()) print_record(*record);
  fmt::print("tensors    {}, {}\nobjects    {}\n", grouped(metadata.tensors.size()),
             human_bytes(metadata.tensor_bytes()), grouped(metadata.objects.size()));
  if (const uint64_t copies = copies_in(metadata); copies > 0) {
    fmt::print("copies     {} of shards and objects, in other files, {}\n", grouped(copies),
               human_bytes(copy_bytes(metadata)));
  }
  for (const auto& [dtype, bytes] : bytes_by_dtype(metadata)) {
    fmt::print("  {:<16} {}\n", dtype, human_bytes(bytes));
  }
  print_about_common(checkpoint);
  print_notes(metadata.notes);
}

int inspect_whole(const Checkpoint& checkpoint, const InspectOptions& options) {
  const Metadata& metadata = checkpoint.metadata();
  const std::vector<FileUse> uses = use_of_files(metadata);
  if (options.json) {
    const Json out = whole_json(checkpoint, uses);
    print_json(out);
    return kOk;
  }
  print_whole(checkpoint, options.path);
  fmt::print("\n");
  const size_t shown = rows_shown(uses.size(), options.all);
  std::vector<size_t> order(uses.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return natural_less(metadata.files[a], metadata.files[b]); });
  Table table({"FILE", "ITEMS", "ITEM BYTES"}, "lrr");
  for (const size_t i : std::span(order).first(shown)) {
    table.add({printable(metadata.files[i]), grouped(uses[i].items), human_bytes(uses[i].bytes)});
  }
  table.print(options.wide);
  print_left_out(uses.size(), shown, "file");
  return kOk;
}

uint32_t number_of(const Metadata& metadata, const StoredTensor& tensor) {
  return static_cast<uint32_t>(&tensor - metadata.tensors.data());
}

Json tensor_json(const Metadata& metadata, const StoredTensor& tensor) {
  Json out = {
      {"key", tensor.key}, {"dtype", to_string(tensor.dtype)}, {"shape", tensor.shape.span()}};
  const auto attributes = metadata.attributes.find(tensor.key);
  if (attributes != metadata.attributes.end()) {
    for (const auto& [name, value] : attributes->second)
      out["attributes"][name] = json_value(value);
  }
  out["chunks"] = Json::array();
  for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
    const StoredChunk& chunk = tensor.chunks[c];
    Json entry = {{"offset", chunk.box.offset.span()}, {"shape", chunk.box.shape.span()}};
    entry["at"] = location_json(metadata, chunk.at);
    if (chunk.flat) entry["at"]["first_element"] = chunk.flat->begin;
    for (const StoredCopy& copy : metadata.copies_of(number_of(metadata, tensor), c)) {
      entry["copies"].push_back(location_json(metadata, copy.at));
    }
    out["chunks"].push_back(std::move(entry));
  }
  return out;
}

void print_attributes(const Metadata& metadata, const std::string& key) {
  const auto attributes = metadata.attributes.find(key);
  if (attributes == metadata.attributes.end()) return;
  for (const auto& [name, value] : attributes->second) {
    fmt::print("attribute  {} = {}\n", printable(name), printable(to_string(value)));
  }
}

int inspect_tensor(const Metadata& metadata, const StoredTensor& tensor,
                   const InspectOptions& options) {
  if (options.json) {
    const Json out = tensor_json(metadata, tensor);
    print_json(out);
    return kOk;
  }
  fmt::print("{}  {} {}  {} in {}\n", key_text(tensor.key), to_string(tensor.dtype),
             shape_text(tensor.shape),
             human_bytes(static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype)),
             counted(tensor.chunks.size(), "shard"));
  print_attributes(metadata, tensor.key);
  const auto copies =
      std::ranges::count(metadata.copies, number_of(metadata, tensor), &StoredCopy::tensor);
  if (copies > 0) {
    fmt::print("copies     {} in other files\n", grouped(static_cast<uint64_t>(copies)));
  }
  const size_t shown = rows_shown(tensor.chunks.size(), options.all);
  Table table({"BOX", "FILE", "OFFSET", "LENGTH", "CRC-32"}, "llrrl");
  table.shorten({1});
  for (size_t i = 0; i < shown; ++i) {
    const StoredChunk& chunk = tensor.chunks[i];
    table.add({to_string(chunk.box), printable(metadata.files[chunk.at.file]),
               std::to_string(chunk.at.offset), std::to_string(chunk.at.length),
               chunk.at.checksums ? fmt::format("{:08x}", chunk.at.checksums->item_crc32) : "-"});
  }
  table.print(options.wide);
  print_left_out(tensor.chunks.size(), shown, "shard");
  return kOk;
}

int inspect_object(const Checkpoint& checkpoint, const StoredObject& object,
                   const InspectOptions& options) {
  const Metadata& metadata = checkpoint.metadata();
  const Value value = checkpoint.read_object(object.key);
  if (options.json) {
    Json out = {{"key", object.key},
                {"kind", to_string(value.kind())},
                {"at", location_json(metadata, object.at)}};
    for (const ItemLocation& copy : object.copies) {
      out["copies"].push_back(location_json(metadata, copy));
    }
    print_json(out);
    return kOk;
  }
  fmt::print("{}  object ({})  {}\n", key_text(object.key), to_string(value.kind()),
             human_bytes(object.at.length));
  Table table({"", "FILE", "OFFSET", "LENGTH"}, "llrr");
  table.shorten({1});
  const auto add = [&](const char* what, const ItemLocation& at) {
    table.add({what, printable(metadata.files[at.file]), std::to_string(at.offset),
               std::to_string(at.length)});
  };
  add("", object.at);
  for (const ItemLocation& copy : object.copies) add("copy", copy);
  table.print(options.wide);
  return kOk;
}

}  // namespace

int inspect(const InspectOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(location_of(options.path, options.follow_links));
  const Metadata& metadata = checkpoint.metadata();
  if (options.key.empty()) return inspect_whole(checkpoint, options);
  const std::string key = key_named(checkpoint, options.key);
  if (const StoredTensor* tensor = metadata.find_tensor(key)) {
    return inspect_tensor(metadata, *tensor, options);
  }
  if (const StoredObject* object = metadata.find_object(key)) {
    return inspect_object(checkpoint, *object, options);
  }
  refuse_key(checkpoint, options.key);
}

}  // namespace tilestone::cli
