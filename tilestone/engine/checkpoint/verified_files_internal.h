// What verify has read of files that several checkpoints share (SaveOptions::reuse), so that it
// reads each of them once for all checkpoints of a run.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

struct VerifiedFiles::State {
  bool knows(const FileIdentity& file) const { return files.contains(file); }
  // What was wrong with this item of the file, as it is expected here; "": nothing. nullptr: it was
  // not read, or with another checksum.
  const std::string* find(const FileIdentity& file, const ItemLocation& item) const;
  void add(const FileIdentity& file, const ItemLocation& item, const std::string& problem);
  // The file is one of a checkpoint under this name.
  void name(const FileIdentity& file, std::string name) {
    files[file].names.push_back(std::move(name));
  }

  struct Item {
    uint64_t offset = 0;
    uint64_t length = 0;
    uint32_t crc32 = 0;
    auto operator<=>(const Item&) const = default;
  };
  static Item key_of(const ItemLocation& item) {
    return {item.offset, item.length, item.checksums->item_crc32};
  }
  struct File {
    std::vector<std::string> names;
    std::map<Item, std::string> items;  // and what is wrong with them
  };
  std::map<FileIdentity, File> files;
};

}  // namespace tilestone
