#include <algorithm>
#include <cctype>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/optimizer_states_internal.h"
#include "tilestone/engine/read/renamed_internal.h"
#include "tilestone/state/sharded.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kGroups = "optimizer.distributed.dp_group_idx_";
constexpr std::string_view kStates = "optimizer.state.";
constexpr std::string_view kShardingType = "param_state_sharding_type";
constexpr std::string_view kDeclaredType = "distrib_optim_sharding_type";
constexpr std::string_view kContent = "content_metadata";
constexpr std::string_view kFormats[] = {"dp_reshardable", "dp_zero_gather_scatter",
                                         "fully_reshardable", "fully_sharded_model_space"};

// Skips digits; false if there are none.
bool skip_number(std::string_view& text) {
  size_t end = 0;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) ++end;
  text.remove_prefix(end);
  return end > 0;
}

// The key without "chained_N.".
std::string_view unchained(std::string_view key) {
  std::string_view rest = key;
  if (!rest.starts_with("chained_")) return key;
  rest.remove_prefix(8);
  if (!skip_number(rest) || !rest.starts_with(".")) return key;
  return rest.substr(1);
}

const Value* entry_of(const Value* dict, std::string_view name) {
  return dict != nullptr && dict->kind() == Value::Kind::kDict ? dict->find(name) : nullptr;
}

void set_entry(Value::Dict& dict, std::string_view name, Value value) {
  for (auto& [key, old] : dict) {
    if (key.kind() != Value::Kind::kString || key.as_string() != name) continue;
    old = std::move(value);
    return;
  }
  dict.emplace_back(std::string(name), std::move(value));
}

// The sharding type of an optimizer, or of the first of a chain.
const Value* sharding_type(const Value* optimizer) {
  if (const Value* const found = entry_of(optimizer, kShardingType)) return found;
  if (optimizer == nullptr || optimizer->kind() != Value::Kind::kDict) return nullptr;
  for (const auto& [number, each] : optimizer->as_dict()) {
    if (const Value* const found = entry_of(&each, kShardingType)) return found;
  }
  return nullptr;
}

// The format according to the program that saved; "": none is declared.
std::string declared_format(const Value* common, const std::string& place) {
  const Value* found = entry_of(entry_of(common, kContent), kDeclaredType);
  if (found == nullptr || found->is_null()) found = sharding_type(entry_of(common, place));
  if (found == nullptr || found->kind() != Value::Kind::kString) return "";
  return found->as_string() == "fully_sharded_bucket_space" ? "dp_reshardable" : found->as_string();
}

}  // namespace

std::optional<std::pair<std::string, std::string>> state_key(std::string_view key) {
  key = unchained(key);
  if (!key.starts_with(kStates)) return std::nullopt;
  key.remove_prefix(kStates.size());
  const size_t dot = key.find('.');
  if (dot == 0 || dot == std::string_view::npos || dot + 1 == key.size()) return std::nullopt;
  return std::pair(std::string(key.substr(0, dot)), std::string(key.substr(dot + 1)));
}

std::string key_of_state(const std::string& state, const std::string& key) {
  return std::string(kStates) + state + "." + key;
}

std::optional<std::pair<std::string, std::string>> group_key(std::string_view key) {
  key = grid_key(key);
  std::string_view rest = unchained(key);
  if (!rest.starts_with(kGroups)) return std::nullopt;
  rest.remove_prefix(kGroups.size());
  if (!skip_number(rest) || !rest.starts_with(".")) return std::nullopt;
  rest.remove_prefix(1);
  return std::pair(std::string(key.substr(0, key.size() - rest.size() - 1)), std::string(rest));
}

void rename_states(Metadata& metadata) {
  std::map<std::string, std::string> names;
  for (const StoredTensor& tensor : metadata.tensors) {
    const auto key = state_key(tensor.key);
    if (!key) continue;
    std::string name = key_of_state(key->first, key->second);
    const std::string main = key_of_state("param", key->second);
    if (key->first == "fp32_param" && metadata.find_tensor(main) == nullptr) name = main;
    if (name != tensor.key) names.emplace(tensor.key, std::move(name));
  }
  if (names.empty()) return;
  rename_keys(metadata, [&](const std::string& key) {
    const auto found = names.find(key);
    return found == names.end() ? key : found->second;
  });
}

namespace {

// The formats whose keys are there; and whether only Megatron FSDP can have written them.
std::pair<std::vector<std::string>, bool> formats_of_keys(const Metadata& stored) {
  bool is_there[4] = {};  // of kFormats
  bool fsdp = false;
  const auto look = [&](std::string_view key, bool object) {
    const auto group = group_key(key);
    const auto state = object ? std::nullopt : state_key(key);
    is_there[0] |= group && !object;
    is_there[1] |= group && object && group->second == "param_state";
    is_there[2] |= state && state->first != "fp32_param";
    is_there[3] |= state && state->first == "fp32_param";
    fsdp |= unchained(key).starts_with("optimizer.param_to_group_meta");
  };
  for (const StoredTensor& tensor : stored.tensors) look(tensor.key, false);
  for (const StoredObject& object : stored.objects) look(object.key, true);
  if (is_there[3]) is_there[2] = false;
  std::vector<std::string> there;
  for (size_t i = 0; i < 4; ++i) {
    if (is_there[i]) there.emplace_back(kFormats[i]);
  }
  return {std::move(there), fsdp && !is_there[0] && !is_there[1]};
}

}  // namespace

std::string optimizer_format(const Metadata& stored, const Value* common,
                             const std::string& place) {
  const auto [there, fsdp] = formats_of_keys(stored);
  const std::string declared = fsdp ? "fsdp_dtensor" : declared_format(common, place);
  const auto known = std::find(std::begin(kFormats), std::end(kFormats), declared);
  if (!declared.empty() && known == std::end(kFormats)) {
    throw Error(ErrorCode::kUnsupported,
                "the optimizer is stored as " + declared + ", which is not supported")
        .with_hint(declared == "fsdp_dtensor"
                       ? "load it with Megatron FSDP; its DTensors reshard when they are loaded"
                       : "formats that can be read: dp_reshardable, dp_zero_gather_scatter, "
                         "fully_reshardable, fully_sharded_model_space");
  }
  if (there.empty()) {
    throw Error(ErrorCode::kNotFound,
                "the checkpoint does not hold the state of a distributed optimizer");
  }
  if (declared.empty()) return there.front();
  const auto fits = [&](const std::string& each) {
    return each == declared || (is_by_parameter(each) && is_by_parameter(declared));
  };
  if (std::any_of(there.begin(), there.end(), fits)) return declared;
  std::string keys;
  for (const std::string& each : there) keys += (keys.empty() ? "" : " and ") + each;
  throw Error(ErrorCode::kCorrupt, "the checkpoint declares the optimizer format " + declared +
                                       ", but its keys are those of " + keys);
}

bool is_by_parameter(std::string_view format) {
  return format == kFormats[2] || format == kFormats[3];
}

std::string optimizer_place(const std::optional<Value>& common) {
  for (const auto& [key, value] : common ? common->as_dict() : Value::Dict()) {
    if (key.kind() == Value::Kind::kString && sharding_type(&value) != nullptr) {
      return key.as_string();
    }
  }
  return "optimizer";
}

// ---- The common state

Value OptimizerStates::groups_of(const StoredGroup& group) const {
  static const std::set<std::string, std::less<>> kOfBuckets = {
      "param_state", "per_bucket_numel", "per_bucket_numel_unpadded", "layout"};
  Value::Dict found;
  for (const auto& [name, object] : group.objects) {
    if (!kOfBuckets.contains(name)) found.emplace_back(name, object_(*object));
  }
  found.emplace_back(std::string(kShardingType), std::string(kFormats[2]));
  return Value::dict(std::move(found));
}

// The group whose objects are those of the optimizer with this number in a chain.
const OptimizerStates::StoredGroup* OptimizerStates::group_for(std::optional<int64_t> chain) const {
  std::vector<const OptimizerLayout*> read;  // a conversion reads all
  for (const auto& [place, flats] : buckets_) read.push_back(place.first);
  std::stable_sort(read.begin(), read.end(), [&](const auto* a, const auto* b) {
    const bool a_fits = a->chain == chain, b_fits = b->chain == chain;
    return a_fits != b_fits ? a_fits : a->group < b->group;
  });
  for (const OptimizerLayout& own : own_) {
    if (own.chain == chain) read.insert(read.begin(), &own);
  }
  for (const OptimizerLayout* const layout : read) {
    const auto group = groups_.find(layout->prefix());
    if (group != groups_.end() && (own_.empty() || group->second.objects.contains("optimizer"))) {
      return &group->second;
    }
  }
  return nullptr;
}

Value OptimizerStates::common(const std::optional<Value>& stored, const std::string& place) const {
  std::set<std::optional<int64_t>> numbers;
  for (const OptimizerLayout& own : own_) numbers.insert(own.chain);
  if (own_.empty()) {
    for (const auto& [prefix, layout] : layouts_) numbers.insert(layout.chain);
  }
  Value::Dict chain;
  std::optional<Value> only;
  for (const std::optional<int64_t>& number : numbers) {
    const StoredGroup* const group = group_for(number);
    if (group == nullptr) {
      throw Error(ErrorCode::kNotFound, "the param groups are not in the checkpoint")
          .with_key(own_.front().prefix() + ".optimizer");
    }
    if (number) {
      chain.emplace_back(*number, groups_of(*group));
    } else {
      only = groups_of(*group);
    }
  }
  Value::Dict common = stored ? stored->as_dict() : Value::Dict();
  set_entry(common, place, only ? *only : Value::dict(std::move(chain)));
  const Value* const described = stored ? stored->find(kContent) : nullptr;
  const bool is_dict = described != nullptr && described->kind() == Value::Kind::kDict;
  Value::Dict content = is_dict ? described->as_dict() : Value::Dict();
  set_entry(content, kDeclaredType, std::string(kFormats[2]));
  set_entry(content, "chained_optim_avoid_prefix", true);
  set_entry(common, kContent, Value::dict(std::move(content)));
  return Value::dict(std::move(common));
}

}  // namespace tilestone::engine
