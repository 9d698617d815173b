// Tests what every format promises in every dialect. A new format or dialect is tested as soon as
// known_formats() or known_dialects() returns it. megatron_shards_dialect(), which is for saves
// only, is tested in the formats that it allows. A format whose files have a header and a trailer
// is made for these tests. Checkpoints are written and read as by one rank, with only the functions
// of format, dialect and index.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "tilestone/base/error.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format_testing.h"
#include "tilestone/format/known/known.h"
#include "tilestone/geometry/grid.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::conformance_test {

constexpr std::string_view kSaveId = "0123abcd-0123-4123-8123-0123456789ab";

TensorView numbered(DType dtype, const Dims& shape, unsigned first) {
  TensorView tensor = TensorView::allocate(dtype, shape);
  for (uint64_t i = 0; i < tensor.bytes(); ++i) {
    // Bytes below 2 are elements of every dtype, bool included.
    tensor.data[i] = static_cast<std::byte>(dtype == DType::kBool ? (first + i) % 2 : first + i);
  }
  return tensor;
}

Bytes elements(const TensorView& tensor) {
  Bytes bytes(tensor.bytes());
  pack_range(tensor.strided_view(), 0, bytes);
  return bytes;
}

// The wrapped entities of a state that has them at its top.
StateDict entities_of(const StateDict& state) {
  StateDict entities;
  for (const auto& [key, node] : state) {
    if (node.get_if<ShardedTensor>() != nullptr || node.get_if<ShardedObject>() != nullptr) {
      entities[key] = node;
    }
  }
  return entities;
}

// A checkpoint in memory, as the engine writes it on one rank. If another program writes the
// dialect's files, it writes the rest of the state into them.
class Written {
 public:
  Written(const Format& format, const Dialect& dialect, const Dialect& reader,
          const StateDict& state)
      : format_(format),
        items_(dialect.to_items(dialect.shares_directory() ? entities_of(state) : state, format)) {
    metadata_.save_id = kSaveId;
    metadata_.dialect = dialect.name();
    format.check(items_);
    if (format.needs_grid()) agree_on_grids();
    for (const ObjectItem& item : items_.objects) {
      add(format_.separate_file(item), {nullptr, nullptr, &item});
    }
    for (const TensorItem& item : items_.tensors) add(item);
    for (uint32_t file = 0; file < planned_.size(); ++file) write(file);
    metadata_.index();
    const Items all = dialect.shares_directory() ? reader.to_items(state, format) : items_;
    index = merge_index(format.encode_index(metadata_), reader.encode_index(all, format));
    for (const IndexFile& file : index) files[file.name] = file.bytes;
  }

  FileImage files;
  Index index;

 private:
  void agree_on_grids() {
    std::map<std::string, Dims> cells;
    for (const TensorItem& item : items_.tensors) {
      for (const Piece& piece : item.pieces) widen_cell(cells[item.key], piece.box);
    }
    for (TensorItem& item : items_.tensors) {
      const Dims& cell = cells[item.key];
      item.chunk_shape = cell.empty() ? Dims(item.global_shape.size(), 1) : cell;
    }
  }

  void add(const TensorItem& item) {
    const bool known = std::any_of(metadata_.tensors.begin(), metadata_.tensors.end(),
                                   [&](const StoredTensor& t) { return t.key == item.key; });
    if (!known) {
      metadata_.tensors.push_back({item.key, item.path, item.dtype, item.global_shape, {}});
    }
    for (const Piece& piece : item.pieces) {
      if (piece.box.empty() && format_.needs_grid()) continue;
      add(format_.separate_file(item, piece), {&item, &piece, nullptr});
    }
  }
  void add(const std::optional<std::string>& own, const FileItem& item) {
    const std::string name = own ? *own : data_file_name(kSaveId, 0, 0);
    const auto known = std::find(metadata_.files.begin(), metadata_.files.end(), name);
    const auto file = static_cast<size_t>(known - metadata_.files.begin());
    if (known == metadata_.files.end()) {
      metadata_.files.push_back(name);
      planned_.emplace_back();
    }
    planned_[file].push_back(item);
  }

  void write(uint32_t file) {
    Bytes bytes;
    const auto append = [&](const Bytes& more) {
      bytes.insert(bytes.end(), more.begin(), more.end());
    };
    const auto encoder = format_.encoder();
    if (format_.files_have_headers()) append(encoder->begin_file(planned_[file]));
    for (const FileItem& item : planned_[file]) {
      const ItemRecipe recipe = item.object != nullptr
                                    ? encoder->object(*item.object, bytes.size())
                                    : encoder->tensor(*item.tensor, *item.piece, bytes.size());
      const ItemLocation at{file, Codec::kNone, bytes.size() + recipe.padding, recipe.length, {}};
      append(render(recipe));
      note(item, at);
    }
    files[metadata_.files[file]] = std::move(bytes);
  }

  void note(const FileItem& item, const ItemLocation& at) {
    if (item.object != nullptr) {
      metadata_.objects.push_back({item.object->key, item.object->path, at});
      return;
    }
    const auto tensor =
        std::find_if(metadata_.tensors.begin(), metadata_.tensors.end(),
                     [&](const StoredTensor& t) { return t.key == item.tensor->key; });
    tensor->chunks.push_back({item.piece->box, at});
  }

  const Format& format_;
  Items items_;
  Metadata metadata_;
  std::vector<std::vector<FileItem>> planned_;  // by index into Metadata::files
};

std::vector<std::string> names_of(const FileImage& files) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files) names.push_back(name);
  return names;
}

DetectedFormat detect(const FileImage& files) {
  return detect_format(names_of(files), [&](const std::string& name) { return files.at(name); });
}

// What the engine passes to parse_index().
DirectoryFiles directory_of(const FileImage& files, const Format& format, const Dialect& dialect) {
  const std::vector<std::string> names = names_of(files);
  DirectoryFiles directory;
  directory.names = names;
  for (const auto& from : {format.index_files(names), dialect.index_files(names)}) {
    for (const std::string& name : from) directory.contents.emplace(name, files.at(name));
  }
  for (const std::string& name : format.sized_files(names)) {
    directory.sizes.emplace(name, files.at(name).size());
  }
  return directory;
}

ByteView item_of(const FileImage& files, const Metadata& metadata, const ItemLocation& at) {
  return ByteView(files.at(metadata.files.at(at.file))).subspan(at.offset, at.length);
}

StoredPayload payload_of(const Format& format, const StoredTensor& tensor, const StoredChunk& chunk,
                         ByteView item) {
  std::vector<ByteView> probed;
  for (const ProbeRange& range : format.probe(chunk.at)) {
    probed.push_back(item.subspan(range.offset, range.size));
  }
  return format.parse_tensor(tensor, chunk, chunk.at, probed);
}

Bytes assembled(const Format& format, const Metadata& metadata, const StoredTensor& tensor,
                const FileImage& files) {
  const uint64_t size = itemsize(tensor.dtype);
  Bytes whole(static_cast<uint64_t>(numel(tensor.shape)) * size);
  const StridedView target = StridedView::contiguous(whole.data(), tensor.shape, size);
  for (const StoredChunk& chunk : tensor.chunks) {
    if (chunk.box.empty()) continue;
    const ByteView view = item_of(files, metadata, chunk.at);
    const StoredPayload stored = payload_of(format, tensor, chunk, view);
    Bytes item(view.begin(), view.end());
    strided_copy(target.narrow(chunk.box),
                 {item.data() + stored.offset, chunk.box.shape, stored.strides, size});
  }
  return whole;
}

StateDict example() {
  StateDict inner;
  inner["w"] = numbered(DType::kFloat32, {2, 3}, 1);
  inner["lr"] = 0.5;
  StateDict state;
  state["model"] = inner;
  state["top"] = ShardedTensor::from_box("rows", numbered(DType::kBFloat16, {4, 3}, 7), {6, 3},
                                         {{0, 0}, {4, 3}});
  state["end"] = ShardedTensor::from_box("rows", numbered(DType::kBFloat16, {2, 3}, 99), {6, 3},
                                         {{4, 0}, {2, 3}});
  state["scalar"] = ShardedTensor::from_box("scalar", numbered(DType::kInt64, {}, 3), {}, {});
  state["empty"] = ShardedTensor::from_box("empty", TensorView::allocate(DType::kInt8, {0, 4}),
                                           {0, 4}, {{0, 0}, {0, 4}});
  state["rng"] = ShardedObject::make("rng", Value("state"), {2}, {1});
  state["step"] = int64_t{41};
  return state;
}

struct Kind {
  std::string name;
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  std::shared_ptr<const Dialect> reader = dialect;  // what reads the dialect's checkpoints
};

class EveryFormat : public testing::TestWithParam<Kind> {
 protected:
  Written written(const StateDict& state) const {
    return {*format_, *GetParam().dialect, *dialect_, state};
  }

  const std::shared_ptr<const Format> format_ = GetParam().format;
  const std::shared_ptr<const Dialect> dialect_ = GetParam().reader;
};

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  const auto add = [&](const std::string& name, const std::shared_ptr<const Format>& format) {
    for (const auto& dialect : known_dialects()) {
      kinds.push_back({name + "_" + std::string(dialect->name()), format, dialect});
    }
  };
  for (const auto& format : known_formats()) add(std::string(format->name()), format);
  const auto framed = framed_format(format_named("torch_dist"));
  add("framed", framed);
  const auto shards = megatron_shards_dialect();
  for (const auto& format : {format_named("torch_dist"), framed}) {
    kinds.push_back({(format == framed ? "framed_" : "torch_dist_") + std::string(shards->name()),
                     format, shards, dialect_named(shards->read_as())});
  }
  return kinds;
}

std::string name_of(const testing::TestParamInfo<Kind>& kind) { return kind.param.name; }

INSTANTIATE_TEST_SUITE_P(Known, EveryFormat, testing::ValuesIn(all_kinds()), name_of);

TEST_P(EveryFormat, WhatIsWrittenIsFoundAndReadsBack) {
  const Written saved = written(example());
  const DetectedFormat found = detect(saved.files);
  ASSERT_NE(found.format, nullptr);
  EXPECT_EQ(found.format->name(), format_->name());
  EXPECT_EQ(found.dialect->name(), dialect_->name());
  const Metadata metadata = format_->parse_index(directory_of(saved.files, *format_, *dialect_));
  const StoredTensor* rows = metadata.find_tensor("rows");
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(rows->dtype, DType::kBFloat16);
  EXPECT_EQ(rows->shape, (Dims{6, 3}));
  Bytes expected = elements(numbered(DType::kBFloat16, {4, 3}, 7));
  const Bytes end = elements(numbered(DType::kBFloat16, {2, 3}, 99));
  expected.insert(expected.end(), end.begin(), end.end());
  EXPECT_EQ(assembled(*format_, metadata, *rows, saved.files), expected);
  ASSERT_NE(metadata.find_tensor("scalar"), nullptr);
  EXPECT_EQ(assembled(*format_, metadata, *metadata.find_tensor("scalar"), saved.files),
            elements(numbered(DType::kInt64, {}, 3)));
  ASSERT_NE(metadata.find_tensor("empty"), nullptr);
  EXPECT_EQ(metadata.find_tensor("empty")->shape, (Dims{0, 4}));
  EXPECT_NE(metadata.find_object("rng/shard_1_2"), nullptr);
}

TEST_P(EveryFormat, ATreeComesBackThroughTheDialect) {
  StateDict wanted = example();
  wanted.others().emplace_back(Value::tuple({Value(1), Value(2)}), Value(7));
  const Written saved = written(wanted);
  const DirectoryFiles directory = directory_of(saved.files, *format_, *dialect_);
  const Metadata metadata = format_->parse_index(directory);
  const std::optional<Value> common = dialect_->parse_common(directory);
  Items items = dialect_->wanted_items(wanted, common ? &*common : nullptr);
  for (TensorItem& item : items.tensors) {
    EXPECT_NE(metadata.find_tensor(item.key), nullptr) << item.key;
  }
  for (ObjectItem& item : items.objects) {
    const StoredObject* stored = metadata.find_object(item.key);
    ASSERT_NE(stored, nullptr) << item.key;
    item.value = dialect_->object_of(
        format_->parse_object(item_of(saved.files, metadata, stored->at)), *format_);
  }
  items.common = common;
  const StateDict loaded = dialect_->from_items(wanted, items);
  const auto* step = loaded.find(std::string("step"));
  ASSERT_NE(step, nullptr);
  EXPECT_EQ(*step->get_if<Value>(), Value(int64_t{41}));
  EXPECT_EQ(loaded.find(std::string("rng"))->get_if<ShardedObject>()->data, Value("state"));
  EXPECT_EQ(loaded.others(), wanted.others());
}

TEST_P(EveryFormat, EveryDTypeIsKeptOrRefusedByItsKey) {
  size_t kept = 0;
  for (const DType dtype : all_dtypes()) {
    StateDict state;
    state["t"] = ShardedTensor::from_box("t", numbered(dtype, {3, 2}, 1), {3, 2}, {{0, 0}, {3, 2}});
    try {
      const Written saved = written(state);
      const Metadata metadata =
          format_->parse_index(directory_of(saved.files, *format_, *dialect_));
      ASSERT_EQ(metadata.find_tensor("t")->dtype, dtype);
      EXPECT_EQ(assembled(*format_, metadata, *metadata.find_tensor("t"), saved.files),
                elements(numbered(dtype, {3, 2}, 1)));
      ++kept;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << to_string(dtype);
      EXPECT_EQ(error.key(), "t");
    }
  }
  EXPECT_GE(kept, 8u);
}

TEST_P(EveryFormat, TheIndexIsDeterministicAndHasOneSwitchThatComesLast) {
  const Written a = written(example()), b = written(example());
  EXPECT_EQ(a.files, b.files);
  size_t switches = 0;
  for (const IndexFile& file : a.index) {
    if (file.role == IndexRole::kSwitch) ++switches;
    EXPECT_EQ(file.role == IndexRole::kBefore, switches == 0) << file.name;
  }
  EXPECT_EQ(switches, 1u);
}

// After a crash before the switch there is no checkpoint.
TEST_P(EveryFormat, WithoutTheSwitchThereIsNoCheckpointOfThisFormatAndDialect) {
  Written saved = written(example());
  saved.files.erase(switch_file(saved.index).name);
  const DetectedFormat found = detect(saved.files);
  const bool same = found.format != nullptr && found.format->name() == format_->name() &&
                    found.dialect->name() == dialect_->name();
  EXPECT_FALSE(same);
}

// The files that a load or a verify finds damaged.
std::set<std::string> found_damaged(const Format& format, const Dialect& dialect,
                                    const FileImage& files) {
  const DirectoryFiles directory = directory_of(files, format, dialect);
  std::set<std::string> names;
  const auto note = [&](const std::function<void()>& parse) {
    try {
      parse();
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::kInternal) << error.what();
      names.insert(error.file());
    }
  };
  note([&] { format.parse_index(directory); });
  note([&] { dialect.parse_common(directory); });
  for (const IndexFault& fault : dialect.verify_index(directory)) names.insert(fault.file);
  return names;
}

// Bytes that differ in one bit may be another valid index.
TEST_P(EveryFormat, ADamagedIndexIsAnErrorThatNamesItsFile) {
  const Written saved = written(example());
  for (const IndexFile& file : saved.index) {
    SCOPED_TRACE(file.name);
    const std::set<std::string> named = {file.name};
    const auto found = [&](const std::function<void(Bytes&)>& damage) {
      FileImage files = saved.files;
      damage(files[file.name]);
      return found_damaged(*format_, *dialect_, files);
    };
    const size_t step = std::max<size_t>(1, file.bytes.size() / 200);
    for (size_t at = 0; at < file.bytes.size(); at += step) {
      const auto cut = found([&](Bytes& bytes) { bytes.resize(at); });
      EXPECT_EQ(cut, named) << "cut to " << at;
      const auto flipped = found([&](Bytes& bytes) { bytes[at] ^= std::byte{0x55}; });
      EXPECT_TRUE(flipped.empty() || flipped == named) << at << ": " << *flipped.begin();
    }
  }
}

TEST_P(EveryFormat, AnItemThatIsCutShortIsDamage) {
  const Written saved = written(example());
  const Metadata metadata = format_->parse_index(directory_of(saved.files, *format_, *dialect_));
  for (const StoredTensor& tensor : metadata.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) {
      const ByteView item = item_of(saved.files, metadata, chunk.at);
      EXPECT_FALSE(format_->verify_tensor(tensor, chunk, item)) << tensor.key;
      if (item.empty()) continue;
      EXPECT_TRUE(format_->verify_tensor(tensor, chunk, item.first(item.size() - 1))) << tensor.key;
    }
  }
  for (const StoredObject& object : metadata.objects) {
    const ByteView item = item_of(saved.files, metadata, object.at);
    EXPECT_FALSE(format_->verify_object(item)) << object.key;
    EXPECT_TRUE(format_->verify_object(item.first(item.size() - 1))) << object.key;
  }
}

}  // namespace tilestone::conformance_test
