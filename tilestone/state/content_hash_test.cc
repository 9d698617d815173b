#include "tilestone/state/content_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace tilestone::content_hash_test {

Value set_of(Value::List items) {
  Opaque opaque;
  opaque.kind = Opaque::Kind::kCall;
  opaque.module = "builtins";
  opaque.name = "set";
  opaque.args = {Value::list(std::move(items))};
  return opaque;
}

Value tensor_of(std::vector<float> numbers, Autograd autograd = {}) {
  TensorView view = TensorView::allocate(DType::kFloat32, {static_cast<int64_t>(numbers.size())});
  std::memcpy(view.data, numbers.data(), view.bytes());
  return {view, autograd};
}

TEST(ContentHash, IsTheSameForEqualValues) {
  const auto make = [] {
    return Value::tuple({1, 2.5, "x", nullptr, true, Value::list({Bytes(3)}), DType::kInt8,
                         tensor_of({1, 2}), Value::dict({{"a", 1}, {2, "b"}})});
  };
  EXPECT_EQ(content_hash(make()), content_hash(make()));
  const Value part = Value::list({1, 2});
  EXPECT_EQ(content_hash(Value::tuple({part, part})),
            content_hash(Value::tuple({Value::list({1, 2}), Value::list({1, 2})})));
}

TEST(ContentHash, DoesNotDependOnTheOrderOfSetsAndDicts) {
  EXPECT_EQ(content_hash(set_of({"a", "b", "c"})), content_hash(set_of({"c", "a", "b"})));
  EXPECT_EQ(content_hash(Value::dict({{"a", 1}, {"b", 2}})),
            content_hash(Value::dict({{"b", 2}, {"a", 1}})));
  EXPECT_NE(content_hash(Value::dict({{"a", 1}, {"b", 2}})),
            content_hash(Value::dict({{"b", 1}, {"a", 2}})));
  EXPECT_NE(content_hash(Value::ordered_dict({{"a", 1}, {"b", 2}})),
            content_hash(Value::ordered_dict({{"b", 2}, {"a", 1}})));
  EXPECT_NE(content_hash(Value::list({1, 2})), content_hash(Value::list({2, 1})));
}

TEST(ContentHash, DiffersForValuesThatDiffer) {
  const std::vector<Value> values = {nullptr,
                                     false,
                                     0,
                                     1,
                                     1.0,
                                     "1",
                                     to_bytes("1"),
                                     Value::list({}),
                                     Value::tuple({}),
                                     Value::dict({}),
                                     Value::list({1}),
                                     Value::list({Value::list({1})}),
                                     tensor_of({1, 2}),
                                     tensor_of({1, 3}),
                                     tensor_of({1, 2}, {true, true}),
                                     tensor_of({1, 2}, {true, false}),
                                     set_of({1}),
                                     Pickled{to_bytes("x"), true},
                                     Pickled{to_bytes("y"), true}};
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(content_hash(values[i]), content_hash(values[j])) << i << " " << j;
    }
  }
}

TEST(ContentHash, TakesADeepOrOftenSharedValue) {
  Value deep = 1;
  for (uint32_t i = 0; i < kMaxValueDepth; ++i) deep = Value::list({deep});
  EXPECT_NE(content_hash(deep), 0u);
  Value wide = Value::list({1});
  for (int i = 0; i < 64; ++i) wide = Value::list({wide, wide});
  EXPECT_NE(content_hash(wide), 0u);
}

}  // namespace tilestone::content_hash_test
