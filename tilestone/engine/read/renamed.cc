#include "tilestone/engine/read/renamed_internal.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

constexpr uint32_t kHidden = ~uint32_t{0};

void expect_new(std::set<std::string>& names, const std::string& name, const std::string& key) {
  if (names.insert(name).second) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "rename gives two keys of the checkpoint the same name; one of them is \"" + key + "\"")
      .with_key(name);
}

}  // namespace

void rename_keys(Metadata& metadata, const std::function<std::string(const std::string&)>& rename) {
  std::set<std::string> names;
  std::map<std::string, Attributes, std::less<>> attributes;
  std::vector<std::pair<std::string, uint32_t>> order;  // new name, old index
  for (uint32_t i = 0; i < metadata.tensors.size(); ++i) {
    const std::string& key = metadata.tensors[i].key;
    std::string name = rename(key);
    if (name.empty()) continue;
    expect_new(names, name, key);
    const auto found = metadata.attributes.find(key);
    if (found != metadata.attributes.end()) attributes.emplace(name, found->second);
    order.emplace_back(std::move(name), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> new_numbers(metadata.tensors.size(), kHidden);  // new index by old index
  std::vector<StoredTensor> tensors;
  for (auto& [name, old] : order) {
    new_numbers[old] = static_cast<uint32_t>(tensors.size());
    StoredTensor& tensor = tensors.emplace_back(std::move(metadata.tensors[old]));
    if (tensor.key != name) tensor.path.clear();
    tensor.key = std::move(name);
  }
  std::vector<StoredObject> objects;
  for (StoredObject& object : metadata.objects) {
    std::string name = rename(object.key);
    if (name.empty()) continue;
    expect_new(names, name, object.key);
    if (object.key != name) object.path.clear();
    object.key = std::move(name);
    objects.push_back(std::move(object));
  }
  for (StoredCopy& copy : metadata.copies) copy.tensor = new_numbers[copy.tensor];
  std::erase_if(metadata.copies, [](const StoredCopy& copy) { return copy.tensor == kHidden; });
  std::stable_sort(metadata.copies.begin(), metadata.copies.end(),
                   [](const StoredCopy& a, const StoredCopy& b) { return a.tensor < b.tensor; });
  metadata.tensors = std::move(tensors);
  metadata.objects = std::move(objects);
  metadata.attributes = std::move(attributes);
  metadata.index();
}

}  // namespace tilestone::engine
