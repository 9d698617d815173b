#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/format_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::verify_test {

using testing::HasSubstr;

FileImage small_checkpoint(const std::shared_ptr<const Format>& format = nullptr) {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.format = format;
    options.resources.files_per_rank = format ? 2 : 1;
    options.resources.buffer_bytes = 1u << 20;
    save(row_state(comm, 1), Location(storage), options);
  });
  return memory_image(*storage);
}

// All problems of a checkpoint; "" if there are none.
std::string problems(const FileImage& image, uint64_t buffer_bytes = 1u << 20) {
  try {
    OpenOptions options;
    options.resources.threads = 1;
    options.resources.buffer_bytes = buffer_bytes;
    const VerifyReport report = Checkpoint::open(Location(memory_storage(image)), options).verify();
    std::string text;
    for (const Damage& damage : report.damages) {
      text += damage.file + " at " + std::to_string(damage.offset) + " key " + damage.key + ": " +
              damage.problem + "\n";
    }
    return text;
  } catch (const Error& error) {
    return error.what();
  }
}

std::string data_file(const FileImage& image) {
  for (const auto& [name, bytes] : image) {
    if (name.ends_with("__0_0.distcp")) return name;
  }
  return "";
}

TEST(Verify, AFlippedByteAnywhereIsFound) {
  FileImage image = small_checkpoint();
  ASSERT_EQ(problems(image), "");
  size_t flips = 0;
  for (auto& [name, bytes] : image) {
    for (std::byte& byte : bytes) {
      byte ^= std::byte{0x10};
      EXPECT_NE(problems(image), "") << name << " byte " << &byte - bytes.data();
      byte ^= std::byte{0x10};
      ++flips;
    }
  }
  std::printf("[          ] %zu flipped bytes, every one found\n", flips);
  EXPECT_GT(flips, 1000u);
}

// Only some formats have headers. Their bytes belong to no item, and no file has a copy of
// another's.
TEST(Verify, AFlippedByteOfAHeaderIsFoundInItsFile) {
  const FileImage image = small_checkpoint(framed_format(torch_dist_format()));
  ASSERT_EQ(problems(image), "");
  expect_rows(Location(memory_storage(image)), 1, 2);
  size_t files = 0;
  for (const auto& [name, bytes] : image) {
    if (!name.ends_with(".distcp")) continue;
    ++files;
    EXPECT_EQ(as_text(ByteView(bytes).subspan(1, 5)), "BEGIN") << name;
    for (const size_t at : {size_t{0}, size_t{6}}) {
      FileImage damaged = image;
      damaged[name][at] ^= std::byte{2};
      EXPECT_THAT(problems(damaged), HasSubstr(name)) << at;
    }
  }
  EXPECT_EQ(files, 3u);  // rank 1 has a single chunk
}

TEST(Verify, TruncationAndBytesAppendedAreFound) {
  const FileImage image = small_checkpoint();
  for (const auto& [name, bytes] : image) {
    if (name == ".tilestone/lock") continue;
    for (size_t keep = 0; keep < bytes.size(); keep += 1 + bytes.size() / 97) {
      FileImage cut = image;
      cut[name].resize(keep);
      EXPECT_NE(problems(cut), "") << name << " cut to " << keep;
    }
    FileImage longer = image;
    longer[name].push_back(std::byte{0});
    EXPECT_NE(problems(longer), "") << name;
  }
}

TEST(Verify, MissingAndSwappedFilesAreFound) {
  const FileImage image = small_checkpoint();
  std::vector<std::string> data;
  for (const auto& [name, bytes] : image) {
    if (name == ".tilestone/lock") continue;
    FileImage without = image;
    without.erase(name);
    EXPECT_NE(problems(without), "") << name;
    if (name.ends_with(".distcp")) data.push_back(name);
  }
  ASSERT_EQ(data.size(), 2u);
  FileImage swapped = image;
  std::swap(swapped[data[0]], swapped[data[1]]);
  EXPECT_NE(problems(swapped), "");
}

TEST(Verify, AMissingManifestOfOursIsReported) {
  FileImage image = small_checkpoint();
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  EXPECT_THAT(problems(image), HasSubstr("the manifest of its save"));
}

TEST(Verify, NamesKeyFileAndOffset) {
  FileImage image = small_checkpoint();
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  const StoredChunk chunk = checkpoint.metadata().find_tensor("p")->chunks[0];
  const std::string file = checkpoint.metadata().files[chunk.at.file];
  image[file][chunk.at.offset + chunk.at.checksums->payload_offset] ^= std::byte{1};
  const std::string text = problems(image);
  EXPECT_THAT(text, HasSubstr(file + " at " + std::to_string(chunk.at.offset) + " key p"));
  EXPECT_THAT(text, HasSubstr("expected CRC-32"));
}

TEST(Verify, ItemsLargerThanABufferAreCheckedInRanges) {
  const auto storage = memory_storage();
  StateDict state;
  state["w"] = counting(DType::kFloat32, {100'000});
  save(state, Location(storage));
  FileImage image = memory_image(*storage);
  EXPECT_EQ(problems(image, kMinBufferBytes), "");
  image[data_file(image)][300'000] ^= std::byte{1};
  EXPECT_THAT(problems(image, kMinBufferBytes), HasSubstr("key w: expected CRC-32"));
}

}  // namespace tilestone::verify_test
