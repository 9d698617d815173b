#include "tilestone/engine/run/inventory.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr size_t kMostNamed = 8;

uint64_t bytes_of(const Inventory::Tensor& tensor) {
  return static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
}

std::string text_of(const Inventory::Tensor& tensor) {
  return fmt::format("{} {}", to_string(tensor.dtype), to_string(tensor.shape));
}

// "a, b and 3 more"
std::string first_of(std::span<const std::string> names) {
  const size_t named = std::min(names.size(), kMostNamed);
  std::string text = fmt::format("{}", fmt::join(names.first(named), ", "));
  return named == names.size() ? text : text + fmt::format(" and {} more", names.size() - named);
}

// The texts, or the first of them and how many more there are.
void add(std::vector<std::string>& found, std::vector<std::string> texts, std::string_view what) {
  const size_t more = texts.size() - std::min(texts.size(), kMostNamed);
  texts.resize(texts.size() - more);
  for (std::string& text : texts) found.push_back(std::move(text));
  if (more > 0) found.push_back(fmt::format("{} more {}", more, what));
}

// Whether there is a key in a dict of this name.
bool has_below(const Inventory& held, const std::string& dict) {
  const std::string prefix = dict + ".";
  const auto in = [&](const auto& next, const auto& end, const auto& name_of) {
    return next != end && name_of(*next).starts_with(prefix);
  };
  const auto of_set = [](const std::string& name) -> const std::string& { return name; };
  const auto of_map = [](const auto& named) -> const std::string& { return named.first; };
  return in(held.tensors.lower_bound(prefix), held.tensors.end(), of_map) ||
         in(held.objects.lower_bound(prefix), held.objects.end(), of_set) ||
         in(held.empty_dicts.lower_bound(prefix), held.empty_dicts.end(), of_set);
}

std::vector<std::string> keys_missing(const Inventory& before, const Inventory& now) {
  std::vector<std::string> missing;
  const auto has = [&](const std::string& key) {
    return now.tensors.contains(key) || now.objects.contains(key);
  };
  for (const auto& [key, tensor] : before.tensors) {
    if (!has(key)) missing.push_back(key);
  }
  // What was None or an empty list may be a container now.
  for (const std::string& key : before.objects) {
    if (!has(key) && !now.empty_dicts.contains(key) && !has_below(now, key)) missing.push_back(key);
  }
  for (const std::string& key : before.empty_dicts) {
    if (!has(key) && !now.empty_dicts.contains(key) && !has_below(now, key)) missing.push_back(key);
  }
  return missing;
}

bool is_leaf(const Value& value) {
  if (value.kind() == Value::Kind::kDict) return value.as_dict().empty();
  if (value.kind() != Value::Kind::kList && value.kind() != Value::Kind::kTuple) return true;
  return std::none_of(value.items().begin(), value.items().end(), [](const Value& item) {
    return item.kind() == Value::Kind::kTensor || item.kind() == Value::Kind::kDict ||
           item.kind() == Value::Kind::kList;
  });
}

// Values are not deeper than a value may be, so recursion ends.
void add_leaves(Inventory& inventory, const Value& value, const std::string& path) {
  if (value.kind() == Value::Kind::kTensor) {
    const TensorView& tensor = value.as_tensor();
    inventory.tensors.emplace(path, Inventory::Tensor{tensor.dtype, tensor.shape});
  } else if (is_leaf(value)) {
    const bool is_dict = value.kind() == Value::Kind::kDict;
    (is_dict ? inventory.empty_dicts : inventory.objects).insert(path);
  } else if (value.kind() == Value::Kind::kDict) {
    for (const auto& [key, item] : value.as_dict()) {
      const bool is_text = key.kind() == Value::Kind::kString;
      add_leaves(inventory, item, path + "." + (is_text ? key.as_string() : to_string(key)));
    }
  } else {
    for (size_t i = 0; i < value.items().size(); ++i) {
      add_leaves(inventory, value.items()[i], fmt::format("{}.{}", path, i));
    }
  }
}

// Whether every rank wrote a part of the tensor, and now only one of as many ranks does.
bool became_one_ranks(const Inventory& before, const Inventory::Tensor& old, const Inventory& now,
                      const Inventory::Tensor& made) {
  const size_t ranks = before.bytes.size();
  return ranks > 1 && ranks == now.bytes.size() && old.writers.size() == ranks &&
         made.writers.size() == 1;
}

std::vector<std::string> ranks_with_less(const Inventory& before, const Inventory& now) {
  std::vector<std::string> less;
  if (before.bytes.size() != now.bytes.size()) return less;
  for (size_t rank = 0; rank < now.bytes.size(); ++rank) {
    if (now.bytes[rank] >= before.bytes[rank]) continue;
    less.push_back(fmt::format("rank {} wrote {} bytes of tensors before and {} now", rank,
                               before.bytes[rank], now.bytes[rank]));
  }
  return less;
}

}  // namespace

Inventory inventory_of(const Metadata& metadata, std::span<const std::vector<std::string>> files) {
  std::map<std::string_view, int> rank_of;
  for (size_t rank = 0; rank < files.size(); ++rank) {
    for (const std::string& file : files[rank]) rank_of.emplace(file, static_cast<int>(rank));
  }
  std::vector<int> ranks;  // by file of the metadata; -1: not known
  for (const std::string& file : metadata.files) {
    const auto rank = rank_of.find(file);
    ranks.push_back(rank == rank_of.end() ? -1 : rank->second);
  }
  Inventory found;
  found.bytes.resize(files.size());
  for (const StoredTensor& tensor : metadata.tensors) {
    Inventory::Tensor held{tensor.dtype, tensor.shape};
    for (const StoredChunk& chunk : tensor.chunks) {
      const int rank = ranks.at(chunk.at.file);
      if (rank < 0) continue;
      held.writers.insert(rank);
      found.bytes[static_cast<size_t>(rank)] +=
          static_cast<uint64_t>(numel(chunk.box.shape)) * itemsize(tensor.dtype);
    }
    found.tensors.emplace(tensor.key, std::move(held));
  }
  for (const StoredObject& object : metadata.objects) found.objects.insert(object.key);
  for (const Path& path : empty_dicts(metadata)) found.empty_dicts.insert(dotted(path));
  return found;
}

void add_common(Inventory& inventory, const Value& common) {
  add_leaves(inventory, common, "common_state");
}

std::vector<std::string> losses(const Inventory& before, const Inventory& now) {
  std::vector<std::string> found;
  const std::vector<std::string> missing = keys_missing(before, now);
  if (missing.size() == 1) found.push_back("the key " + missing.front() + " is missing");
  if (missing.size() > 1) {
    found.push_back(fmt::format("{} keys are missing: {}", missing.size(), first_of(missing)));
  }
  std::vector<std::string> smaller, of_one_rank;
  for (const auto& [key, old] : before.tensors) {
    const auto there = now.tensors.find(key);
    if (there == now.tensors.end()) continue;
    const Inventory::Tensor& made = there->second;
    if (bytes_of(made) < bytes_of(old)) {
      smaller.push_back(
          fmt::format("{} has fewer bytes: it was {} and is {}", key, text_of(old), text_of(made)));
    }
    if (became_one_ranks(before, old, now, made)) {
      of_one_rank.push_back(
          fmt::format("{} holds only what rank {} has, and before all {} ranks wrote a part of it",
                      key, *made.writers.begin(), before.bytes.size()));
    }
  }
  add(found, std::move(smaller), "tensors have fewer bytes");
  add(found, std::move(of_one_rank), "tensors hold only what one rank has");
  if (!found.empty()) add(found, ranks_with_less(before, now), "ranks wrote fewer bytes");
  return found;
}

void compare_with_before(const RunStep& step, const Inventory& now) {
  if (step.before == nullptr) return;
  const std::vector<std::string> lost = losses(*step.before, now);
  if (lost.empty()) return;
  const std::string text = fmt::format("{} lacks something that {} has: {}", step.name,
                                       step.before_name, fmt::join(lost, "; "));
  if (step.strict) {
    throw Error(ErrorCode::kMismatch, text)
        .with_hint("if this is intended, save once with a manager that is not strict");
  }
  log(LogLevel::kWarning, text);
}

}  // namespace tilestone
