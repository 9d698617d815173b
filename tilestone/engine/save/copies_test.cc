// Checkpoints whose receipts list copies: of chunks, in files that no index names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/manifest.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::copies_test {

using testing::HasSubstr;
using testing::IsEmpty;

void save_rows(const std::shared_ptr<Storage>& storage, int64_t first) {
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.overwrite = true;
    options.resources.buffer_bytes = 1u << 20;
    save(row_state(comm, first), Location(storage), options);
  });
}

// What two ranks have written. Rank 0's row of "w" is also in a second file of rank 1.
struct Written {
  FileImage files;
  std::vector<Receipt> receipts;
  std::string save_id;
  std::string copy_file;
};

Manifest manifest_in(const FileImage& image) {
  for (const auto& [name, bytes] : image) {
    if (name.ends_with(".manifest")) return Manifest::decode(bytes, name);
  }
  throw std::logic_error("no manifest");
}

Written with_copy() {
  const auto storage = memory_storage();
  save_rows(storage, 1);
  FileImage image = memory_image(*storage);
  const Manifest manifest = manifest_in(image);
  Written written;
  written.save_id = manifest.save_id;
  written.receipts = manifest.receipts;
  written.copy_file = data_file_name(written.save_id, 1, 1);
  for (const Receipt& receipt : manifest.receipts) {
    for (const ReceiptFile& file : receipt.files) written.files[file.name] = image.at(file.name);
  }
  const Receipt& zero = written.receipts[0];
  for (const Receipt::Chunk& chunk : zero.chunks) {
    if (zero.tensors[chunk.tensor].key != "w") continue;
    const Bytes& from = image.at(zero.files[chunk.at.file].name);
    const auto begin = from.begin() + static_cast<ptrdiff_t>(chunk.at.offset);
    Bytes& copy = written.files[written.copy_file];
    copy.assign(begin, begin + static_cast<ptrdiff_t>(chunk.at.length));
    Receipt& one = written.receipts[1];
    one.files.push_back({written.copy_file, copy.size()});
    for (uint32_t t = 0; t < one.tensors.size(); ++t) {
      if (one.tensors[t].key != "w") continue;
      one.copies.push_back({t, chunk.box, {1, 0, chunk.at.length, chunk.at.checksums}});
    }
  }
  return written;
}

// Publishes as the coordinator of that save does.
void publish(const std::shared_ptr<Storage>& storage, const Written& written) {
  engine::Transaction transaction(storage, torch_dist_format(), pytorch_dialect(), written.save_id,
                                  false);
  transaction.begin(Deadline::never());
  for (const auto& [name, bytes] : written.files) {
    const auto file = storage->create(name);
    file->append(bytes);
    file->close();
  }
  std::vector<Bytes> encoded;
  for (const Receipt& receipt : written.receipts) encoded.push_back(receipt.encode());
  transaction.prepare({.save = {.receipts = written.receipts, .encoded = encoded}, .threads = 1},
                      Deadline::never());
  transaction.commit(Deadline::never());
  transaction.clean();
}

FileImage published() {
  const auto storage = memory_storage();
  publish(storage, with_copy());
  return memory_image(*storage);
}

std::string file_of_copy(const Checkpoint& checkpoint) {
  return checkpoint.metadata().files.at(checkpoint.metadata().copies.at(0).at.file);
}

TEST(Copies, AreFoundByOpenAndUnknownToTheIndexAndToLoads) {
  FileImage image = published();
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  ASSERT_EQ(checkpoint.metadata().copies.size(), 1u);
  EXPECT_EQ(checkpoint.metadata().find_tensor("w")->chunks.size(), 2u);
  const std::string file = file_of_copy(checkpoint);
  EXPECT_THAT(std::string(as_text(image.at(".metadata"))), testing::Not(HasSubstr(file)));
  image.erase(file);
  expect_rows(Location(memory_storage(image)), 1, 2);
}

TEST(Copies, AreVerifiedLikeOtherItems) {
  const FileImage image = published();
  const Checkpoint whole = Checkpoint::open(Location(memory_storage(image)));
  const VerifyReport sound = whole.verify();
  EXPECT_TRUE(sound.ok()) << sound.damages.front().problem;
  EXPECT_EQ(sound.files, 3u);
  const std::string file = file_of_copy(whole);
  for (size_t at = 0; at < image.at(file).size(); at += 7) {
    FileImage damaged = image;
    damaged[file][at] ^= std::byte{8};
    const auto found = Checkpoint::open(Location(memory_storage(damaged))).verify().damages;
    ASSERT_EQ(found.size(), 1u) << at;
    EXPECT_EQ(found[0].file, file);
    EXPECT_EQ(found[0].key, "w");
  }
  FileImage lost = image;
  lost.erase(file);
  const auto found = Checkpoint::open(Location(memory_storage(lost))).verify().damages;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].file, file);
}

TEST(Copies, FilesAreNoLeftoversAndGoWithTheirCheckpoint) {
  const FileImage image = published();
  const auto storage = memory_storage(image);
  const std::string file = file_of_copy(Checkpoint::open(Location(storage)));
  EXPECT_THAT(find_leftovers(Location(storage), true), IsEmpty());
  save_rows(storage, 50);
  EXPECT_FALSE(storage->stat(file));
  expect_rows(Location(storage), 50, 2);
  EXPECT_TRUE(Checkpoint::open(Location(storage)).metadata().copies.empty());
}

}  // namespace tilestone::copies_test
