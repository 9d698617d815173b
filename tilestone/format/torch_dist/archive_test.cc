// Tests that torch.save archives can be read back, and that hostile ones are refused.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_writer_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/format/archive/zip_writer_internal.h"
#include "tilestone/format/format_testing.h"
#include "tilestone/format/torch_dist/checkpoint_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::torch_dist::archive_test {

using namespace archive;  // the pickles and archives that torch_dist is made of

TensorItem item_of(std::string key) {
  TensorItem item;
  item.key = std::move(key);
  return item;
}

TensorView counted(DType dtype, const Dims& shape) {
  TensorView tensor = TensorView::allocate(dtype, shape);
  for (uint64_t i = 0; i < tensor.bytes(); ++i) tensor.data[i] = static_cast<std::byte>(i % 251);
  return tensor;
}

StoredPayload parse(const Format& format, ByteView item) {
  const ItemLocation at{.length = item.size()};
  std::vector<ByteView> probed;
  for (const ProbeRange& range : format.probe(at)) {
    probed.push_back(item.subspan(range.offset, range.size));
  }
  return format.parse_tensor({}, {}, at, probed);
}

ErrorCode refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(Archive, EveryDtypeReadsBack) {
  const auto format = torch_dist_format();
  for (DType dtype : all_dtypes()) {
    SCOPED_TRACE(to_string(dtype));
    const TensorView tensor = counted(dtype, {3, 5});
    const Piece piece{Box::whole(tensor.shape), tensor};
    const Bytes item = render(format->encoder()->tensor(item_of("k"), piece, 0));
    const StoredPayload payload = parse(*format, item);
    EXPECT_EQ(payload.dtype, dtype);
    EXPECT_EQ(payload.shape, tensor.shape);
    EXPECT_EQ(payload.strides, contiguous_strides(tensor.shape));
    const ByteView bytes = ByteView(item).subspan(payload.offset, tensor.bytes());
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), tensor.data));
    EXPECT_EQ(payload.record_crc32, crc32(bytes));
    EXPECT_FALSE(format->verify_object(item));
  }
}

TEST(Archive, PayloadsAreAlignedInTheFile) {
  const auto format = torch_dist_format();
  const auto encoder = format->encoder();
  std::mt19937_64 random(7);
  for (int i = 0; i < 100; ++i) {
    const int64_t sizes[] = {static_cast<int64_t>(random() % 100), 70'000, 1'100'000};
    const int64_t elements = sizes[random() % 3];
    const uint64_t file_offset = random() % 100'000;
    const TensorView tensor = counted(DType::kUInt8, {elements});
    const Piece piece{Box::whole(tensor.shape), tensor};
    const ItemRecipe recipe = encoder->tensor(item_of("k"), piece, file_offset);
    const uint64_t payload = file_offset + recipe.padding + recipe.payload_offset;
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    const uint64_t place = elements < 1 << 20 ? 0 : address % 4096 / 64 * 64;
    EXPECT_EQ(payload % (elements >= 65536 ? 4096 : 64), place);
    EXPECT_EQ(recipe.payload_offset % 64, 0u);
    EXPECT_LT(recipe.length, static_cast<uint64_t>(elements) + 1024);
    EXPECT_EQ(render(recipe).size(), recipe.padding + recipe.length);
  }
}

TEST(Archive, OneEncoderGivesTheBytesOfAFreshOne) {
  const auto format = torch_dist_format();
  const auto encoder = format->encoder();
  const Dims shapes[] = {{3, 5}, {15}, {5, 3}, {}, {0, 3}, {3, 5}};
  std::mt19937_64 random(8);
  uint64_t offset = 0;
  for (int i = 0; i < 300; ++i) {
    const DType dtype = all_dtypes()[random() % all_dtypes().size()];
    const TensorView tensor = counted(dtype, shapes[random() % std::size(shapes)]);
    for (uint64_t b = 0; b < tensor.bytes(); ++b) tensor.data[b] ^= static_cast<std::byte>(i);
    const Piece piece{Box::whole(tensor.shape), tensor};
    const Bytes item = render(encoder->tensor(item_of("k"), piece, offset));
    EXPECT_EQ(item, render(format->encoder()->tensor(item_of("k"), piece, offset)));
    EXPECT_FALSE(format->verify_object(ByteView(item).subspan(-offset % 64)));
    offset += item.size();
  }
}

TEST(Archive, TensorsOfMoreThan4GiBUseZip64) {
  // The tensor is not read; only the segments around it are made.
  std::byte none{};
  TensorView tensor;
  tensor.data = &none;
  tensor.dtype = DType::kFloat64;
  tensor.shape = {5, 1 << 27};
  tensor.strides = contiguous_strides(tensor.shape);
  const auto format = torch_dist_format();
  const Piece piece{Box::whole(tensor.shape), tensor};
  const ItemRecipe recipe = format->encoder()->tensor(item_of("k"), piece, 0);
  const uint64_t size = uint64_t{5} << 30;
  EXPECT_EQ(recipe.segments.at(1).size, size);
  const Bytes head = recipe.segments.at(0).literal->bytes;
  const Bytes tail = with_crc32(*recipe.segments.at(2).literal, 0x12345678);
  ASSERT_EQ(tail.size(), recipe.segments.at(2).size);

  const ItemLocation at{.length = recipe.length};
  const auto ranges = format->probe(at);
  ASSERT_EQ(ranges.size(), 2u);
  Bytes first(ranges[0].size);
  Bytes last(ranges[1].size);
  std::copy(head.begin(), head.end(), first.begin());
  std::copy(tail.begin(), tail.end(), last.end() - static_cast<ptrdiff_t>(tail.size()));
  const std::vector<ByteView> probed{first, last};
  const StoredPayload payload = format->parse_tensor({}, {}, at, probed);
  EXPECT_EQ(payload.record_size, size);
  EXPECT_EQ(payload.offset, recipe.payload_offset);
  EXPECT_EQ(payload.record_crc32, 0x12345678u);
  EXPECT_EQ(payload.shape, tensor.shape);
}

TEST(Archive, ValuesReadBack) {
  BigInt big;
  big.bytes = to_bytes(std::string(8, '\0') + "\x40");
  Bytes every_byte;
  for (int i = 0; i < 256; ++i) every_byte.push_back(static_cast<std::byte>(i));
  Opaque opaque;
  opaque.kind = Opaque::Kind::kNew;
  opaque.module = "argparse";
  opaque.name = "Namespace";
  opaque.has_state = true;
  opaque.state = Value::dict({{"lr", 1.5}});
  const Value value = Value::dict({{"none", nullptr},
                                   {"true", true},
                                   {"negative", int64_t{-5'000'000'000}},
                                   {"big", big},
                                   {"text", "\xd0\xba \xe2\x9c\x93"},
                                   {"bytes", every_byte},
                                   {"list", Value::list({1, 300, 70'000, Value::list({})})},
                                   {"tuple", Value::tuple({Value::tuple({}), "a"})},
                                   {"dtype", DType::kFloat8E5M2},
                                   {"tensor", counted(DType::kBFloat16, {2, 3})},
                                   {"scalar", counted(DType::kInt64, {})},
                                   {"empty", counted(DType::kFloat32, {0, 4})},
                                   {3, opaque}});
  const Bytes archive = write_torch_archive(value);
  EXPECT_EQ(read_torch_archive(archive), value);
  EXPECT_FALSE(torch_dist_format()->verify_object(archive));
}

Opaque object_of(Opaque::Kind kind, std::string name) {
  Opaque object;
  object.kind = kind;
  object.module = "m";
  object.name = std::move(name);
  return object;
}

TEST(Archive, OpaqueObjectsAreWrittenAsWhatTheyWere) {
  Opaque made = object_of(Opaque::Kind::kNew, "Outer.Inner");
  made.args = {1, Value(object_of(Opaque::Kind::kGlobal, "function"))};
  made.keywords = {{"k", Value::ordered_dict({{"b", 2}, {"a", 1}}, Value::dict({{"_m", 7}}))}};
  made.appended = {Value::list({3})};
  made.entries = {{"e", counted(DType::kInt8, {2})}};
  made.has_state = true;
  Opaque call = object_of(Opaque::Kind::kCall, "f");
  call.args = {Value(made)};
  for (const Value& value : {Value(made), Value(call), Value::list({Value(call), Value(made)})}) {
    check_value(value);
    EXPECT_EQ(read_torch_archive(write_torch_archive(value)), value);
  }
  // A module whose name means another module in protocol 2.
  call.module = "commands";
  EXPECT_EQ(read_torch_archive(write_torch_archive(Value(call))), Value(call));
}

TEST(Archive, WhatIsSharedIsWrittenOnceAndReadAsOne) {
  const Value part = Value::list({std::string(1000, 'x')});
  const Bytes archive = write_torch_archive(Value::tuple({part, Value::tuple({part, part})}));
  EXPECT_LT(archive.size(), 3000u);
  const Value value = read_torch_archive(archive);
  EXPECT_EQ(&value.items()[0].items(), &value.items()[1].items()[1].items());
}

TEST(Archive, WhatIsWrittenDoesNotDependOnWhoElseHasPartsOfTheValue) {
  const auto make = [] {
    const Value pair = Value::tuple({Value(0.9), Value(to_bytes("raw"))});
    const Value tensor = Value(counted(DType::kFloat32, {3}));
    Opaque object = object_of(Opaque::Kind::kNew, "C");
    object.args = {pair, tensor};
    return Value::dict({{"pair", pair},
                        {"list", Value::list({Value::list({1}), tensor})},
                        {"object", Value(object)},
                        {pair, Value::ordered_dict({{"k", Value::list({})}}, Value::dict({}))}});
  };
  const Bytes alone = write_torch_archive(make());
  const Value value = make();
  const Value whole = value;
  const Value part = value.as_dict()[1].second.items()[0];
  const Value again = value.as_dict()[3].second.attributes();
  EXPECT_EQ(write_torch_archive(value), alone);
  EXPECT_EQ(write_torch_archive(read_torch_archive(alone)), alone);
}

TEST(Archive, ValuesThatCouldNotBeReadBackAreRefused) {
  const auto refused = [](const Value& value) {
    return refusal([&] { check_value(value); }) == ErrorCode::kInvalidArgument;
  };
  Value wide = Value::list({1});
  for (int i = 0; i < 60; ++i) wide = Value::list({wide, wide});
  EXPECT_TRUE(refused(wide));
  EXPECT_TRUE(refused("\xff"));
  EXPECT_TRUE(refused(Value::dict({{Value::list({}), 1}})));
  EXPECT_TRUE(refused(Value::list({Pickled{to_bytes("\x80\x02N."), false}})));
  EXPECT_TRUE(refused(Pickled{to_bytes("\x80\x02]q"), false}));
  const std::string cycle("\x80\x02]q\0h\0a.", 9);
  EXPECT_TRUE(refused(Pickled{to_bytes(cycle), false}));
  EXPECT_TRUE(refused(Pickled{to_bytes("\x80\x02K\1Q."), false}));  // a storage without a tensor
  EXPECT_TRUE(refused(object_of(Opaque::Kind::kCall, "")));
  EXPECT_TRUE(refused(object_of(Opaque::Kind::kCall, "a\nb")));
  EXPECT_FALSE(refused(object_of(Opaque::Kind::kCall, "ok")));
}

// What unfolds to more than 1 GiB is refused only if it is small itself.
TEST(Archive, LargeValuesAreNoValuesThatContainTheSamePartsTooOften) {
  const auto repeated = [](size_t bytes, size_t times) {
    const Value part = Value::list({std::string(bytes, 'x')});
    return Value::list(Value::List(times, part));
  };
  const Value large = repeated(24u << 20, 46);
  check_value(large);
  EXPECT_EQ(read_torch_archive(write_torch_archive(large)), large);
  check_value(repeated(24u << 20, 100));
  EXPECT_EQ(refusal([&] { check_value(repeated(24u << 20, 110)); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal([&] { check_value(repeated(1u << 20, 1100)); }), ErrorCode::kInvalidArgument);
}

TEST(Archive, APickledObjectIsWrittenAsItIs) {
  const Bytes pickle = to_bytes("\x80\x02K\x07.");
  const Bytes wrapped = write_torch_archive(Pickled{pickle, false});
  EXPECT_EQ(read_torch_archive(wrapped).as_int(), 7);
  EXPECT_EQ(write_torch_archive(Pickled{wrapped, true}), wrapped);
  EXPECT_EQ(refusal([&] { write_torch_archive(Value::list({Pickled{pickle, false}})); }),
            ErrorCode::kInvalidArgument);
}

TEST(Archive, TruncationAtEveryLengthIsRefused) {
  const Bytes whole = write_torch_archive(counted(DType::kFloat32, {4}));
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(read_torch_archive(ByteView(whole).first(size)), Error) << size;
  }
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_EQ(refusal([&] { read_torch_archive(longer); }), ErrorCode::kCorrupt);
}

// Flips every single bit of an item. Either it is noticed, or the item still means the same.
TEST(Archive, AnyFlippedBitIsNoticedOrHarmless) {
  const Value value = Value::list({1, "text", counted(DType::kFloat32, {4})});
  const Bytes whole = write_torch_archive(value);
  size_t harmless = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes damaged = whole;
    damaged[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    if (torch_dist_format()->verify_object(damaged)) continue;
    ++harmless;
    EXPECT_EQ(read_torch_archive(damaged), value) << "bit " << bit;
  }
  EXPECT_LT(harmless, 8 * whole.size());
}

// ---- Archives that no writer makes ----

Bytes tensor_pickle(const Dims& shape, const Dims& strides, int64_t elements) {
  PickleWriter pickle(2);
  pickle.global("torch._utils", "_rebuild_tensor_v2");
  pickle.op(op::kMark);
  pickle.op(op::kMark);
  pickle.string("storage");
  pickle.global("torch", "FloatStorage");
  pickle.string("0");
  pickle.string("cpu");
  pickle.integer(elements);
  pickle.op(op::kTuple);
  pickle.op(op::kBinPersId);
  pickle.integer(0);
  pickle.int_tuple(shape);
  pickle.int_tuple(strides);
  pickle.boolean(false);
  pickle.none();
  pickle.op(op::kTuple);
  pickle.op(op::kReduce);
  return std::move(pickle).finish();
}

Bytes archive_of(ByteView pickle, size_t storage_bytes) {
  ZipWriter archive;
  archive.add("x/data/0", Bytes(storage_bytes));  // in any order and any folder
  archive.add("x/data.pkl", pickle);
  archive.finish();
  return archive.take();
}

ErrorCode tensor_refusal(const Dims& shape, const Dims& strides, int64_t elements,
                         size_t storage_bytes) {
  const Bytes item = archive_of(tensor_pickle(shape, strides, elements), storage_bytes);
  const auto format = torch_dist_format();
  const ErrorCode tensor = refusal([&] { parse(*format, item); });
  EXPECT_EQ(refusal([&] { read_torch_archive(item); }), tensor);
  EXPECT_EQ(format->verify_object(item).has_value(), tensor != ErrorCode::kInternal);
  return tensor;
}

TEST(Archive, StridesInsideTheStorageAreHonoured) {
  EXPECT_EQ(tensor_refusal({2, 3}, {1, 2}, 6, 24), ErrorCode::kInternal);
  EXPECT_EQ(tensor_refusal({2, 3}, {10, 2}, 100, 400), ErrorCode::kInternal);
  EXPECT_EQ(tensor_refusal({1000, 1000}, {0, 0}, 1, 4), ErrorCode::kInternal);
  EXPECT_EQ(tensor_refusal({0, 3}, {3, 1}, 0, 0), ErrorCode::kInternal);
}

TEST(Archive, StridesOutsideTheStorageAreRefused) {
  EXPECT_EQ(tensor_refusal({2, 3}, {3, 1}, 5, 20), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({2, 3}, {1000, 1}, 6, 24), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({2}, {INT64_MAX}, 6, 24), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({2, 3}, {1}, 6, 24), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({INT64_MAX, 4}, {0, 0}, 6, 24), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({-1}, {1}, 6, 24), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({1}, {1}, INT64_MAX, 24), ErrorCode::kCorrupt);
}

TEST(Archive, AStorageOfAnotherSizeThanItsRecordIsRefused) {
  EXPECT_EQ(tensor_refusal({2, 3}, {3, 1}, 6, 20), ErrorCode::kCorrupt);
  EXPECT_EQ(tensor_refusal({2, 3}, {3, 1}, 6, 28), ErrorCode::kCorrupt);
}

TEST(Archive, SharedStoragesAreCopiedOnce) {
  // Ten thousand expanded views of one element: the value needs no more memory than the archive.
  PickleWriter pickle(2);
  pickle.op(op::kEmptyList);
  pickle.op(op::kMark);
  const Bytes one = tensor_pickle({1 << 20, 1 << 20}, {0, 0}, 1);
  Bytes all = std::move(pickle).finish();
  all.pop_back();
  for (int i = 0; i < 10'000; ++i) all.insert(all.end(), one.begin() + 2, one.end() - 1);
  all.push_back(std::byte{op::kAppends});
  all.push_back(std::byte{op::kStop});
  const Value value = read_torch_archive(archive_of(all, 4));
  ASSERT_EQ(value.items().size(), 10'000u);
  EXPECT_EQ(value.items()[0].as_tensor().data, value.items()[9'999].as_tensor().data);
}

// A tensor whose elements are the conjugates or the negatives of the stored ones.
Bytes lazy_pickle(std::string_view storage, int64_t count, std::string_view what) {
  PickleWriter pickle(2);
  pickle.global("torch._utils", "_rebuild_tensor_v2");
  pickle.op(op::kMark);
  pickle.op(op::kMark);
  pickle.string("storage");
  pickle.global("torch", storage);
  pickle.string("0");
  pickle.string("cpu");
  pickle.integer(2);
  pickle.op(op::kTuple);
  pickle.op(op::kBinPersId);
  pickle.integer(0);
  pickle.int_tuple({count});
  pickle.int_tuple({count > 2 ? 0 : 1});
  pickle.boolean(false);
  pickle.none();
  pickle.op(op::kEmptyDict);
  pickle.string(what);
  pickle.boolean(true);
  pickle.op(op::kSetItem);
  pickle.op(op::kTuple);
  pickle.op(op::kReduce);
  return std::move(pickle).finish();
}

TEST(Archive, LazilyConjugatedAndNegatedTensorsAreReadAsWhatTheyMean) {
  const float stored[] = {1, -2, 3, 4};
  const auto read = [&](std::string_view storage, int64_t count, std::string_view what) {
    ZipWriter archive;
    archive.add("x/data.pkl", lazy_pickle(storage, count, what));
    const size_t size = storage == "FloatStorage" ? 8 : 16;
    archive.add("x/data/0", ByteView(reinterpret_cast<const std::byte*>(stored), size));
    archive.finish();
    const Bytes item = archive.take();
    EXPECT_EQ(refusal([&] { parse(*torch_dist_format(), item); }), ErrorCode::kUnsupported);
    const Value value = read_torch_archive(item);
    std::vector<float> numbers(value.as_tensor().bytes() / sizeof(float));
    std::memcpy(numbers.data(), value.as_tensor().data, value.as_tensor().bytes());
    return numbers;
  };
  EXPECT_EQ(read("ComplexFloatStorage", 2, "conj"), (std::vector<float>{1, 2, 3, -4}));
  EXPECT_EQ(read("ComplexFloatStorage", 2, "neg"), (std::vector<float>{-1, 2, -3, -4}));
  EXPECT_EQ(read("FloatStorage", 2, "neg"), (std::vector<float>{-1, 2}));
  EXPECT_THROW(read("ComplexFloatStorage", 1 << 20, "conj"), Error);  // 8 MiB out of 16 bytes
}

TEST(Archive, TwoRecordsOfOneNameAreRefused) {
  ZipWriter archive;
  archive.add("a/data.pkl", as_bytes("\x80\x02N."));
  archive.add("a/data.pkl", as_bytes("\x80\x02N."));
  archive.finish();
  const Bytes item = archive.take();
  EXPECT_EQ(refusal([&] { read_torch_archive(item); }), ErrorCode::kCorrupt);
}

TEST(Archive, DeflatedRecordsAreUnsupportedAndNamed) {
  Bytes item = write_torch_archive(1);
  const std::string_view text = as_text(item);
  item[text.find("PK\1\2") + 10] = std::byte{8};
  try {
    read_torch_archive(item);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(error.message().find("archive/data.pkl"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find("method 8"), std::string::npos) << error.what();
  }
}

TEST(Archive, FilesFromBeforeTorch16AreUnsupported) {
  const std::string legacy("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
  EXPECT_EQ(refusal([&] { read_torch_archive(as_bytes(legacy)); }), ErrorCode::kUnsupported);
}

// torch.load would run such a pickle.
TEST(Archive, ABarePickleInThePlaceOfAnArchiveIsCorrupt) {
  const char* const pickle =
      "\x80\x02"
      "cos\nsystem\nU\2ls\x85R.";
  EXPECT_EQ(refusal([&] { read_torch_archive(as_bytes(pickle)); }), ErrorCode::kCorrupt);
  EXPECT_TRUE(torch_dist_format()->verify_object(as_bytes(pickle)));
}

}  // namespace tilestone::torch_dist::archive_test
