// Megatron-Core's dialect. Its index files are common.pt, from which Megatron-Core up to 0.18 reads
// the common state, and metadata.json, which tells Megatron-Core that a checkpoint is complete. In
// torch_dist the common state is also stored as an object, from which Megatron-Core since 0.19
// reads it.
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/dialect/megatron_internal.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone {
namespace dialect {
namespace {

const std::string kConfigFile(kMegatronConfig);
const std::string kCommonFile(kMegatronCommon);

// The dict in common.pt.
Value parse_common_file(ByteView bytes) {
  return with_file(kCommonFile, [&] {
    Value common = read_torch_archive(bytes);
    if (common.kind() == Value::Kind::kDict) return common;
    throw Error(ErrorCode::kCorrupt, "expected a dict as the common state, found a value of kind " +
                                         std::string(to_string(common.kind())));
  });
}

std::optional<IndexFault> fault_of_common(ByteView bytes) {
  try {
    if (const auto fault = archive::check_archive(bytes)) {
      return IndexFault{kCommonFile, fault->offset, fault->problem};
    }
    parse_common_file(bytes);
    return std::nullopt;
  } catch (const Error& error) {
    return IndexFault{kCommonFile, 0, error.message(), error.code() == ErrorCode::kUnsafe};
  }
}

class MegatronDialect : public Dialect {
 public:
  std::string_view name() const override { return "megatron"; }
  bool has_replica_names() const override { return true; }
  std::string_view mark() const override { return kMegatronConfig; }
  bool can_lose_keys() const override { return true; }

  Items to_items(const StateDict& state, const Format& format) const override {
    return split(state, format);
  }
  Index encode_index(const Items& items, const Format& format) const override {
    return {{kCommonFile, write_torch_archive(items.common.value()), IndexRole::kBefore},
            {kConfigFile, write_megatron_config(format.name(), format.backend_version()),
             IndexRole::kSwitch}};
  }
  bool has_fixed_names() const override { return true; }

  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    std::vector<std::string> found;
    for (const std::string& name : {kCommonFile, kConfigFile}) {
      if (contains_name(names, name)) found.push_back(name);
    }
    return found;
  }
  std::optional<Value> parse_common(const DirectoryFiles& files) const override {
    const auto found = files.contents.find(kCommonFile);
    if (found == files.contents.end()) return std::nullopt;
    return parse_common_file(found->second);
  }
  std::string_view common_object() const override { return kCommonObject; }
  Value common_as_object(Value common) const override { return as_object(std::move(common)); }

  std::vector<IndexFault> verify_index(const DirectoryFiles& files) const override {
    std::vector<IndexFault> faults;
    const auto config = files.contents.find(kConfigFile);
    if (config == files.contents.end()) {
      faults.push_back({kConfigFile, 0, "the file is missing"});
    } else if (!read_megatron_config(config->second)) {
      faults.push_back({kConfigFile, 0, "the file is not a JSON object with a sharded_backend"});
    }
    const auto common = files.contents.find(kCommonFile);
    if (common == files.contents.end()) return faults;
    if (auto fault = fault_of_common(common->second)) faults.push_back(*std::move(fault));
    return faults;
  }

  // Megatron-Core's list may hold several objects of one key. Tilestone takes the first.
  Value object_of(Value stored, const Format& format) const override {
    if (!lists_objects(format)) return stored;
    if (stored.kind() == Value::Kind::kList && !stored.items().empty()) {
      return stored.items().front();
    }
    throw Error(ErrorCode::kCorrupt,
                "expected a non-empty list that holds the object, found a value of kind " +
                    std::string(to_string(stored.kind())));
  }
  Items wanted_items(const StateDict& wanted, const Value* common) const override {
    return wanted_of(wanted, common == nullptr ? Value::dict({}) : *common);
  }
  StateDict from_items(StateDict wanted, const Items& loaded) const override {
    return merged(wanted, loaded);
  }
};

// The same dialect without its index files, which Megatron-Core itself writes.
class MegatronShardsDialect final : public MegatronDialect {
 public:
  std::string_view name() const override { return "megatron_shards"; }
  std::string_view read_as() const override { return MegatronDialect::name(); }
  bool shares_directory() const override { return true; }
  bool has_fixed_names() const override { return false; }

  Items to_items(const StateDict& state, const Format& format) const override {
    if (lists_objects(format)) return split_shards(state, format);
    throw Error(
        ErrorCode::kUnsupported,
        "the dialect megatron_shards can't be saved in the format " + std::string(format.name()))
        .with_hint("save in the format torch_dist, or save in the dialect megatron");
  }
  Index encode_index(const Items&, const Format&) const override { return {}; }
};

}  // namespace
}  // namespace dialect

std::shared_ptr<const Dialect> megatron_dialect() {
  return std::make_shared<dialect::MegatronDialect>();
}

std::shared_ptr<const Dialect> megatron_shards_dialect() {
  return std::make_shared<dialect::MegatronShardsDialect>();
}

}  // namespace tilestone
