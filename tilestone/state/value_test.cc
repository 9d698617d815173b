#include "tilestone/state/value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tilestone/base/error_testing.h"

namespace tilestone::value_test {

using testing::HasSubstr;

Bytes raw(std::initializer_list<int> values) {
  Bytes bytes;
  for (int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}

Value namespace_of(Value::Dict attributes) {
  Opaque object;
  object.kind = Opaque::Kind::kNew;
  object.module = "argparse";
  object.name = "Namespace";
  object.state = Value::dict(std::move(attributes));
  object.has_state = true;
  return object;
}

TEST(Value, KnowsItsKind) {
  EXPECT_EQ(Value().kind(), Value::Kind::kNull);
  EXPECT_EQ(Value(true).kind(), Value::Kind::kBool);
  EXPECT_EQ(Value(3).kind(), Value::Kind::kInt);
  EXPECT_EQ(Value(2.5).kind(), Value::Kind::kFloat);
  EXPECT_EQ(Value("x").kind(), Value::Kind::kString);
  EXPECT_EQ(Value(raw({1})).kind(), Value::Kind::kBytes);
  EXPECT_EQ(Value::list({}).kind(), Value::Kind::kList);
  EXPECT_EQ(Value::tuple({}).kind(), Value::Kind::kTuple);
  EXPECT_EQ(Value::dict({}).kind(), Value::Kind::kDict);
  EXPECT_EQ(Value(TensorView::allocate(DType::kInt8, {2})).kind(), Value::Kind::kTensor);
  EXPECT_EQ(Value(DType::kInt8).kind(), Value::Kind::kDType);
  EXPECT_EQ(Value(Opaque{}).kind(), Value::Kind::kOpaque);
  EXPECT_EQ(Value(Pickled{}).kind(), Value::Kind::kPickled);
  EXPECT_EQ(Value(uint64_t{7}).as_int(), 7);
  EXPECT_EQ(Value(~uint64_t{0}).kind(), Value::Kind::kBigInt);
}

TEST(Value, WrongKindNamesBothKinds) {
  EXPECT_THAT(error_of([] { (void)Value("x").as_int(); }),
              IsError(ErrorCode::kInvalidArgument, "", "string", "not int"));
  EXPECT_THAT(error_of([] { (void)Value::dict({}).items(); }),
              IsError(ErrorCode::kInvalidArgument, "", "dict", "not list or tuple"));
}

TEST(Value, AsGivesContentByTypeAndRefusesNumbersThatDoNotFit) {
  EXPECT_EQ(Value(-3).as<int16_t>(), -3);
  EXPECT_EQ(Value(UINT64_MAX).as<uint64_t>(), UINT64_MAX);
  EXPECT_EQ(Value("x").as<std::string>(), "x");
  EXPECT_EQ(Value::tuple({1, 2}).as<Value::List>().size(), 2u);
  EXPECT_TRUE(Value(true).as<bool>());
  const auto problem = [](auto&& body) -> std::string {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.message();
    }
    return "none";
  };
  EXPECT_THAT(problem([] { (void)Value(300).as<uint8_t>(); }), HasSubstr("[0, 255]"));
  EXPECT_THAT(problem([] { (void)Value(-1).as<uint64_t>(); }), HasSubstr("-1"));
  EXPECT_THAT(problem([] { (void)Value(-129).as<int8_t>(); }), HasSubstr("[-128, 127]"));
  EXPECT_THAT(problem([] { (void)Value(UINT64_MAX).as<uint32_t>(); }), HasSubstr("4294967295]"));
  EXPECT_THAT(problem([] { (void)Value(UINT64_MAX).as<int64_t>(); }), HasSubstr("big int"));
  EXPECT_THAT(problem([] { (void)Value(1).as<bool>(); }), HasSubstr("int"));
  EXPECT_THAT(problem([] { (void)Value(1).as<double>(); }), HasSubstr("float"));
}

TEST(Value, FindsEntriesOfADictByName) {
  const Value dict = Value::dict({{"a", 1}, {2, "two"}, {"b", 3}});
  ASSERT_NE(dict.find("b"), nullptr);
  EXPECT_EQ(dict.find("b")->as_int(), 3);
  EXPECT_EQ(dict.find("2"), nullptr);
}

TEST(Value, EqualityIsByKindAndContent) {
  EXPECT_EQ(Value::list({1, "a", Value()}), Value::list({1, "a", nullptr}));
  EXPECT_FALSE(Value::list({1}) == Value::tuple({1}));
  EXPECT_FALSE(Value(1) == Value(true));
  EXPECT_FALSE(Value(1) == Value(1.0));
  EXPECT_FALSE(Value(0.0) == Value(-0.0));
  EXPECT_EQ(Value(std::nan("")), Value(std::nan("")));
  EXPECT_FALSE(Value::list({1}) == Value::list({1, 2}));
  EXPECT_EQ(Value::dict({{"a", 1}}), Value::dict({{"a", 1}}));
  EXPECT_FALSE(Value::dict({{"a", 1}}) == Value::dict({{"b", 1}}));
  EXPECT_EQ(namespace_of({{"a", 1}}), namespace_of({{"a", 1}}));
  EXPECT_FALSE(namespace_of({{"a", 1}}) == namespace_of({{"a", 2}}));
  EXPECT_FALSE(Value(Pickled{raw({1}), true}) == Value(Pickled{raw({1}), false}));
}

TEST(Value, TensorsAreEqualByElementsNotByStrides) {
  int16_t rows[6] = {1, 2, 3, 4, 5, 6};
  int16_t columns[6] = {1, 4, 2, 5, 3, 6};
  const Value a = TensorView::contiguous(rows, DType::kInt16, {2, 3});
  const Value b =
      TensorView::strided(columns, DType::kInt16, {2, 3}, {1, 2}, columns, sizeof columns);
  EXPECT_EQ(a, b);
  columns[5] = 7;
  EXPECT_FALSE(a == b);
  EXPECT_FALSE(a == Value(TensorView::contiguous(rows, DType::kInt16, {3, 2})));
  EXPECT_FALSE(a == Value(TensorView::contiguous(rows, DType::kFloat16, {2, 3})));
}

TEST(Value, TensorsThatAValueCantHoldAreRefused) {
  EXPECT_THROW(Value(TensorView::without_data(DType::kInt8, {2})), Error);
}

TEST(ValueText, FloatsReadAsPythonWritesThem) {
  const std::pair<double, const char*> cases[] = {
      {0.0, "0.0"},
      {-0.0, "-0.0"},
      {1.0, "1.0"},
      {-2.5, "-2.5"},
      {0.1, "0.1"},
      {1.0 / 3.0, "0.3333333333333333"},
      {100.0, "100.0"},
      {123456.789, "123456.789"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {1.5e16, "1.5e+16"},
      {9007199254740993.0, "9007199254740992.0"},
      {1e-4, "0.0001"},
      {1e-5, "1e-05"},
      {1.25e-7, "1.25e-07"},
      {1e100, "1e+100"},
      {5e-324, "5e-324"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {std::numeric_limits<double>::infinity(), "inf"},
      {-std::numeric_limits<double>::infinity(), "-inf"},
      {std::nan(""), "nan"},
  };
  for (const auto& [value, text] : cases) EXPECT_EQ(to_string(Value(value)), text);
}

TEST(ValueText, StringsAreQuotedAndEscapedAsPythonDoes) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "''"},
      {"plain", "'plain'"},
      {"it's", "\"it's\""},
      {"say \"hi\"", "'say \"hi\"'"},
      {"it's \"x\"", "'it\\'s \"x\"'"},
      {"a\\b", "'a\\\\b'"},
      {"\n\r\t", "'\\n\\r\\t'"},
      {std::string("\0\x1b\x7f", 3), "'\\x00\\x1b\\x7f'"},
      {"\xc3\xa9", "'\xc3\xa9'"},
      {"\xc2\xa0\xc2\xad", "'\\xa0\\xad'"},
      {"\xe2\x80\xa8\xe2\x80\x8b", "'\\u2028\\u200b'"},
      {"\xe3\x80\x80", "'\\u3000'"},
      {"\xed\xa0\x80", "'\\ud800'"},
      {"\xf0\x9f\x98\x80", "'\xf0\x9f\x98\x80'"},
      {"\xf3\xa0\x80\x81", "'\\U000e0001'"},
      {"\xff\xc3", "'\\xff\\xc3'"},
  };
  for (const auto& [value, text] : cases) EXPECT_EQ(to_string(Value(value)), text);
}

TEST(ValueText, BytesAreQuotedAndEscapedAsPythonDoes) {
  EXPECT_EQ(to_string(Value(to_bytes("a'b"))), "b\"a'b\"");
  EXPECT_EQ(to_string(Value(raw({0, 0x0a, 0x41, 0x7f, 0x80, 0xff}))),
            "b'\\x00\\nA\\x7f\\x80\\xff'");
  EXPECT_EQ(to_string(Value(to_bytes("'\""))), "b'\\'\"'");
}

TEST(ValueText, BigIntsAreDecimal) {
  EXPECT_EQ(to_string(Value(~uint64_t{0})), "18446744073709551615");
  EXPECT_EQ(to_string(BigInt{raw({0, 0, 0, 0, 0, 0, 0, 0, 1})}), "18446744073709551616");
  EXPECT_EQ(to_string(BigInt{raw({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff})}),
            "-9223372036854775809");
  EXPECT_EQ(to_string(BigInt{raw({0, 0, 0, 0, 0, 0, 0, 0, 0x80})}), "-2361183241434822606848");
  EXPECT_EQ(to_string(BigInt{}), "0");
  EXPECT_EQ(to_string(BigInt{raw({0xff})}), "-1");
  EXPECT_EQ(to_string(Value(BigInt{Bytes(5000, std::byte{1})})), "int of 5000 bytes");
}

TEST(ValueText, ContainersReadAsPython) {
  EXPECT_EQ(to_string(Value::dict({{"a", Value::list({1, 2.5})}})), "{'a': [1, 2.5]}");
  EXPECT_EQ(to_string(Value::tuple({})), "()");
  EXPECT_EQ(to_string(Value::tuple({1})), "(1,)");
  EXPECT_EQ(to_string(Value::tuple({1, nullptr, true})), "(1, None, True)");
  EXPECT_EQ(to_string(Value::list({Value::list({}), Value::dict({})})), "[[], {}]");
  EXPECT_EQ(to_string(Value::dict({{1, "x"}, {Value(), false}})), "{1: 'x', None: False}");
  EXPECT_EQ(to_string(Value(TensorView::allocate(DType::kFloat32, {2, 3}))),
            "tensor float32 [2, 3]");
  EXPECT_EQ(to_string(Value(DType::kBFloat16)), "torch.bfloat16");
}

TEST(ValueText, OpaqueObjectsAreShownAsCalls) {
  EXPECT_EQ(to_string(namespace_of({{"lr", 0.5}, {"name", "a"}, {"odd key", 1}})),
            "argparse.Namespace(lr=0.5, name='a', 'odd key'=1)");
  Opaque global;
  global.module = "signal";
  global.name = "Signals";
  EXPECT_EQ(to_string(Value(global)), "signal.Signals");
  Opaque call = global;
  call.kind = Opaque::Kind::kCall;
  call.args = {15};
  EXPECT_EQ(to_string(Value(call)), "signal.Signals(15)");
  call.appended = {1, "a"};
  call.entries = {{"k", 2}};
  call.has_state = true;
  call.state = Value::tuple({3});
  EXPECT_EQ(to_string(Value::list({call, 4})),
            "[signal.Signals(15, state=(3,)).update(1, 'a', 'k': 2), 4]");
  EXPECT_EQ(to_string(Value(Pickled{raw({1, 2, 3}), true})), "pickled object of 3 bytes");
}

TEST(ValueText, StopsAtTheLimitBetweenCharacters) {
  EXPECT_EQ(to_string(Value("abcdef"), 4), "'abc...");
  EXPECT_EQ(to_string(Value("\xc3\xa9\xc3\xa9"), 2), "'...");
  EXPECT_EQ(to_string(Value("\xc3\xa9\xc3\xa9"), 3), "'\xc3\xa9...");
  const Value long_list = Value::list(Value::List(1'000'000, Value(7)));
  EXPECT_EQ(to_string(long_list, 9), "[7, 7, 7,...");
}

TEST(Value, ValuesNestedTooDeepAreRefusedAndOthersHaveTextAndEquality) {
  const auto deep = [] {
    Value value = 1;
    for (uint32_t i = 0; i < kMaxValueDepth;) {
      switch (i % 4) {
        case 0:
          value = Value::list({value});
          ++i;
          break;
        case 1:
          value = Value::dict({{"k", value}});
          ++i;
          break;
        default:  // the object, and the dict of its attributes
          value = namespace_of({{"a", value}});
          i += 2;
      }
    }
    return value;
  };
  const Value a = deep();
  const Value b = deep();
  EXPECT_EQ(a, b);
  EXPECT_FALSE(a == deep().as_opaque().state);
  EXPECT_THAT(to_string(a), HasSubstr("argparse.Namespace(a="));
  const auto too_deep = IsError(ErrorCode::kInvalidArgument, "", "nested deeper than 1000 levels");
  EXPECT_THAT(error_of([&] { Value::list({a}); }), too_deep);
  EXPECT_THAT(error_of([&] { Value::tuple({a}); }), too_deep);
  EXPECT_THAT(error_of([&] { Value::dict({{"k", a}}); }), too_deep);
  EXPECT_THAT(error_of([&] { Value::ordered_dict({}, a); }), too_deep);
  EXPECT_THAT(error_of([&] { namespace_of({{"a", a}}); }), too_deep);
}

}  // namespace tilestone::value_test
