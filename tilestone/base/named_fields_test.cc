#include "tilestone/base/named_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::named_fields_test {

std::vector<NamedField> read(ByteView bytes) {
  ByteReader in(bytes, "record");
  std::vector<NamedField> fields;
  read_named_fields(in, [&](std::string_view name, ByteView value) {
    fields.emplace_back(name, Bytes(value.begin(), value.end()));
  });
  return fields;
}

Bytes written(const std::vector<NamedField>& fields) {
  ByteWriter out;
  write_named_fields(out, fields);
  return std::move(out).take();
}

TEST(NamedFields, AreReadAsWrittenAndTakeNoByteWhereThereAreNone) {
  const std::vector<NamedField> fields = {{"a", to_bytes("1")}, {"b", {}}};
  EXPECT_EQ(read(written(fields)), fields);
  EXPECT_TRUE(written({}).empty());
  EXPECT_TRUE(read({}).empty());
}

TEST(NamedFields, TwiceOrOutOfOrderOrCutOffAreRefused) {
  EXPECT_THROW(read(written({{"a", {}}, {"a", {}}})), Error);
  EXPECT_THROW(read(written({{"b", {}}, {"a", {}}})), Error);
  EXPECT_THROW(read(to_bytes(std::string_view("\0", 1))), Error);
  const Bytes whole = written({{"name", to_bytes("value")}});
  for (size_t size = 1; size < whole.size(); ++size) {
    EXPECT_THROW(read(ByteView(whole).first(size)), Error) << size;
  }
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_THROW(read(longer), Error);
}

}  // namespace tilestone::named_fields_test
