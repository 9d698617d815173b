#include <fmt/format.h>

#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {
namespace {

void expect_same(const Receipt::Tensor& one, const Receipt::Tensor& other, int rank) {
  if (one.dtype == other.dtype && one.global_shape == other.global_shape) return;
  throw Error(ErrorCode::kMismatch,
              fmt::format("{} reports parts of two tensors under one key: {} {} and {} {}",
                          rank_text(rank), to_string(one.dtype), to_string(one.global_shape),
                          to_string(other.dtype), to_string(other.global_shape)))
      .with_key(one.key)
      .with_rank(rank);
}

}  // namespace

Receipt joined_receipts(Receipt first, Receipt second) {
  std::map<std::string, uint32_t> known;
  for (uint32_t i = 0; i < first.tensors.size(); ++i) known.emplace(first.tensors[i].key, i);
  std::vector<uint32_t> numbers;  // of the second receipt's tensors in the joined one
  for (Receipt::Tensor& tensor : second.tensors) {
    const auto [found, is_new] =
        known.try_emplace(tensor.key, static_cast<uint32_t>(first.tensors.size()));
    if (is_new) {
      first.tensors.push_back(std::move(tensor));
    } else {
      expect_same(first.tensors[found->second], tensor, second.rank);
    }
    numbers.push_back(found->second);
  }
  const auto files = static_cast<uint32_t>(first.files.size());
  std::move(second.files.begin(), second.files.end(), std::back_inserter(first.files));
  const auto add = [&](auto& to, auto& from) {
    for (auto& item : from) {
      if constexpr (requires { item.tensor; }) item.tensor = numbers.at(item.tensor);
      item.at.file += files;
      to.push_back(std::move(item));
    }
  };
  add(first.chunks, second.chunks);
  add(first.copies, second.copies);
  add(first.objects, second.objects);
  add(first.object_copies, second.object_copies);
  for (Receipt::FilePart& part : second.parts) {
    part.file += files;
    first.parts.push_back(part);
  }
  for (auto& [tensor, attributes] : second.attributes) {
    first.attributes.insert_or_assign(numbers.at(tensor), std::move(attributes));
  }
  first.dict_keys = std::move(second.dict_keys);  // of the whole state in both
  std::move(second.held.begin(), second.held.end(), std::back_inserter(first.held));
  first.state = second.state;
  first.steps = std::move(second.steps);  // with those of the first
  return first;
}

}  // namespace tilestone
