// For n bytes of input a parser may allocate at most `factor` * n + `room` bytes, whatever the
// input contains. The tests use inputs that repeat one opcode, the fuzz targets' corpora and
// hostile files. They print the largest multiple for each parser.
#include <gtest/gtest.h>
#include <zstd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>

#include "tests/allocation_count.h"
#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/format/zarr/array_metadata_internal.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::memory_multiple_test {

namespace fs = std::filesystem;

constexpr uint64_t kRoom = 32u << 10;  // bytes

struct Input {
  std::string name;
  Bytes bytes;
};

void add_files(const fs::path& folder, std::vector<Input>& inputs) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    inputs.push_back({entry.path().filename().string(), to_bytes(text)});
  }
}

// The corpus and the regression files of a fuzz target.
std::vector<Input> files_of(const std::string& target) {
  std::vector<Input> inputs;
  const fs::path root = TILESTONE_FUZZ_DIR;
  add_files(root / "corpus" / target, inputs);
  add_files(root / "regressions" / target, inputs);
  EXPECT_GT(inputs.size(), 5u);
  return inputs;
}

std::string repeated(const std::string& text, size_t bytes) {
  std::string out;
  while (out.size() < bytes) out += text;
  return out;
}

// Measures the memory use of one parser.
class Meter {
 public:
  Meter(const char* parser, double factor, std::function<void(ByteView)> parse)
      : parser_(parser), factor_(factor), parse_(std::move(parse)) {}
  ~Meter() {
    std::printf("[          ] %s: %zu inputs, at most %.1f bytes a byte (%s), allowed %.0f\n",
                parser_, tried_, most_, worst_.c_str(), factor_);
  }

  void feed(const std::string& name, ByteView bytes) {
    ++tried_;
    const uint64_t before = allocated_bytes();
    reset_peak();
    try {
      parse_(bytes);
    } catch (const Error&) {
    }
    const uint64_t used = peak_bytes() - before;
    if (used <= kRoom) return;
    const auto size = static_cast<double>(std::max<size_t>(1, bytes.size()));
    const double multiple = static_cast<double>(used - kRoom) / size;
    EXPECT_LE(multiple, factor_) << parser_ << ": " << name << " of " << bytes.size()
                                 << " bytes takes " << used;
    if (multiple <= most_) return;
    most_ = multiple;
    worst_ = name;
  }
  void feed(const std::vector<Input>& inputs) {
    for (const Input& input : inputs) feed(input.name, input.bytes);
  }
  // Repeats each opcode many times, alone and after opcodes that give it operands.
  void feed_floods(const std::string& end);

 private:
  const char* const parser_;
  const double factor_;
  const std::function<void(ByteView)> parse_;
  size_t tried_ = 0;
  double most_ = 0;
  std::string worst_ = "none";
};

void Meter::feed_floods(const std::string& end) {
  constexpr size_t kSize = 8000;
  using std::literals::operator""s;
  const std::string starts[] = {
      "\x80\x04"s,  "\x80\x04N"s,    "\x80\x04]"s,  "\x80\x04}"s,
      "\x80\x04)"s, "\x80\x04]q\0"s, "\x80\x04}("s, "\x80\x04"s + repeated("N", kSize / 2)};
  const std::string operands[] = {""s, "N"s, "NN"s, "("s, "(N"s, "2"s, "h\0"s, "]"s, "K\1"s};
  for (int op = 0; op < 256; ++op) {
    const std::string opcode(1, static_cast<char>(op));
    for (const std::string& start : starts) {
      for (const std::string& operand : operands) {
        for (const std::string& argument : {""s, "\0"s, "\1\0\0\0"s, "a\nb\n"s}) {
          const std::string flood = start + repeated(operand + opcode + argument, kSize) + end;
          feed("flood of opcode " + std::to_string(op), to_bytes(flood));
        }
      }
    }
  }
}

TEST(MemoryMultiple, OfThePickleMachine) {
  Meter meter("pickle", archive::Pickle::kMemoryFactor,
              [](ByteView bytes) { archive::Pickle::parse(bytes); });
  meter.feed(files_of("pickle"));
  meter.feed_floods("");
}

TEST(MemoryMultiple, OfValues) {
  Meter meter("value", 256, [](ByteView bytes) { read_pickle(bytes); });
  meter.feed(files_of("pickle"));
  meter.feed_floods(".");
}

TEST(MemoryMultiple, OfZipDirectories) {
  Meter meter("zip", 4,
              [](ByteView bytes) { archive::ZipDirectory::parse(archive::ItemBytes(bytes)); });
  meter.feed(files_of("zip"));
}

TEST(MemoryMultiple, OfTensorItemsAndArchives) {
  Meter items("tensor item", 64, [](ByteView item) {
    const ItemLocation at{.length = item.size()};
    std::vector<ByteView> probed;
    for (const ProbeRange& range : torch_dist_format()->probe(at)) {
      probed.push_back(item.subspan(range.offset, range.size));
    }
    torch_dist_format()->parse_tensor({}, {}, at, probed);
  });
  items.feed(files_of("tensor_item"));
  Meter archives("archive", 256, [](ByteView item) { read_torch_archive(item); });
  archives.feed(files_of("torch_archive"));
}

TEST(MemoryMultiple, OfMetadata) {
  Meter meter("metadata", 128, [](ByteView bytes) {
    Metadata metadata = torch_dist::parse_metadata(bytes);
    metadata.index();
  });
  meter.feed(files_of("torch_metadata"));
}

TEST(MemoryMultiple, OfZarrArrays) {
  Meter meter("zarr array", 64, [](ByteView bytes) { zarr::parse_array(bytes, "w/.zarray"); });
  meter.feed(files_of("zarr_array"));
}

TEST(MemoryMultiple, OfSafetensorsHeaders) {
  Meter meter("safetensors header", 64, [](ByteView file) {
    const ByteView first = file.first(std::min<size_t>(file.size(), safetensors::kLengthBytes));
    const uint64_t length = safetensors::header_length(first, file.size(), "f");
    safetensors::parse_header(file.subspan(safetensors::kLengthBytes, length), file.size(), "f");
  });
  meter.feed(files_of("safetensors"));
  const std::string tensor = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  for (const std::string item : {"[", "[],", "{},", "0,", R"({"":)", R"({"":0},)"}) {
    for (const std::string begin : {"", R"({"w":)", R"({"w":[)", R"({"__metadata__":{"a":)"}) {
      const std::string text = begin + repeated(item, 20'000);
      ByteWriter file;
      file.u64(text.size());
      file.raw(as_bytes(text));
      meter.feed("flood of " + item + " after " + begin, file.bytes());
    }
  }
  std::string many = R"({"w":)" + tensor;
  for (int i = 0; many.size() < 20'000; ++i) many += ",\"" + std::to_string(i) + "\":" + tensor;
  many += "}";
  ByteWriter file;
  file.u64(many.size());
  file.raw(as_bytes(many));
  meter.feed("many tensors", file.bytes());
}

TEST(MemoryMultiple, OfManifests) {
  Meter meter("manifest", 64, [](ByteView bytes) {
    ByteWriter sealed;
    sealed.raw(bytes);
    sealed.u64(xxh3_64(bytes));
    Manifest::decode(sealed.bytes(), "manifest");
  });
  for (const Input& input : files_of("manifest")) {
    meter.feed(input.name, input.bytes);
    for (size_t at = 0; at < input.bytes.size(); ++at) {  // any byte may be a count
      Bytes changed = input.bytes;
      changed[at] = std::byte{0xff};
      meter.feed(input.name + " at " + std::to_string(at), changed);
    }
  }
}

TEST(MemoryMultiple, OfReports) {
  Meter meter("receipt", 64, [](ByteView bytes) {
    ByteWriter sealed;
    sealed.raw(bytes);
    sealed.u64(xxh3_64(bytes));
    Receipt::decode(sealed.bytes());
  });
  Receipt receipt;
  receipt.files = {{"f", 1}};
  receipt.tensors = {{"w", {}, DType::kInt8, {1}}};
  const auto feed = [&](const std::string& name) {
    const Bytes bytes = receipt.encode();
    meter.feed(name, ByteView(bytes).first(bytes.size() - sizeof(uint64_t)));
  };
  const BlockSums two{(64u << 10) + 1, 64u << 10, {1, 2}};
  receipt.files = {{"f", 1u << 30}};
  receipt.chunks.assign(10'000, {0, {{0}, {1}}, {0, 0, 1u << 30, {}}});
  for (Receipt::Chunk& chunk : receipt.chunks) {
    chunk.at.checksums.blocks = std::make_shared<const BlockSums>(two);
  }
  feed("two blocks of each chunk");
  receipt.chunks.clear();
  receipt.copies.assign(10'000, {0, {{0}, {1}}, {}});
  feed("copies");
  receipt.copies.clear();
  receipt.object_copies.assign(10'000, {});
  feed("copies of objects");
  receipt.object_copies.clear();
  receipt.parts.assign(10'000, {});
  feed("parts");
  receipt.parts.clear();
  receipt.attributes[0]["a"] = Value::list(Value::List(100'000));
  feed("a list of nulls");
  receipt.attributes[0]["a"] = Value::dict(Value::Dict(10'000, {"", nullptr}));
  feed("a dict of nulls");
  receipt.attributes.clear();
  for (int i = 0; i < 10'000; ++i) receipt.attributes[0][std::to_string(i)] = nullptr;
  feed("many attributes");
}

TEST(MemoryMultiple, OfCompressedItemsIsWhatTheReaderAllows) {
  const Bytes zeros(64u << 20);
  Bytes bomb(ZSTD_compressBound(zeros.size()));
  bomb.resize(ZSTD_compress(bomb.data(), bomb.size(), zeros.data(), zeros.size(), 3));
  constexpr uint64_t kAllowed = 1u << 20;
  const uint64_t before = allocated_bytes();
  reset_peak();
  EXPECT_THROW(torch_dist_format()->decode(Codec::kZstd, bomb, kAllowed), Error);
  constexpr uint64_t kWindow = 8u << 20;  // zstd's window at this level; the maximum is 128 MiB
  // A growing buffer has its old and its new memory at the same time.
  EXPECT_LE(peak_bytes() - before, 3 * kAllowed + kWindow);
}

TEST(MemoryMultiple, OfATensorThatOnlyTheMetadataPromises) {
  // The metadata of a valid checkpoint, changed to a tensor and a chunk of 2^40 elements.
  const auto format = torch_dist_format();
  Metadata metadata;
  metadata.files = {"data.distcp"};
  StoredTensor tensor;
  tensor.key = "w";
  tensor.dtype = DType::kUInt8;
  tensor.shape = {int64_t{1} << 40};
  tensor.chunks.push_back({Box::whole(tensor.shape), {.file = 0, .offset = 0, .length = 100}});
  metadata.tensors.push_back(tensor);
  metadata.index();
  const auto storage = memory_storage(
      {{".metadata", format->encode_index(metadata).front().bytes}, {"data.distcp", Bytes(100)}});
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  const uint64_t before = allocated_bytes();
  reset_peak();
  try {
    checkpoint.read("w");
    ADD_FAILURE() << "2^40 elements in 100 bytes";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
    EXPECT_EQ(error.key(), "w");
  }
  EXPECT_LE(peak_bytes() - before, 1u << 20);
  EXPECT_FALSE(checkpoint.verify().ok());
}

}  // namespace tilestone::memory_multiple_test
