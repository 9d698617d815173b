#include "tilestone/engine/staging_testing.h"

#include <gtest/gtest.h>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr std::string_view kCommonBegin = "common state of step ";
constexpr std::string_view kMetadataBegin = R"({"sharded_backend": "torch_dist", "step": )";

class FixedNames : public Dialect {
 public:
  std::string_view name() const override { return "fixed_names"; }
  Items to_items(const StateDict& state, const Format& format) const override {
    return base_->to_items(state, format);
  }
  Index encode_index(const Items& items, const Format& format) const override {
    std::string step = "0";
    for (const ObjectItem& item : items.objects) {
      if (item.key == "step") step = std::to_string(item.value.as_int());
    }
    Index index = base_->encode_index(items, format);
    const auto add = [&](const char* name, const std::string& text) {
      index.push_back({name, to_bytes(text), IndexRole::kAfter});
    };
    add("common.pt", std::string(kCommonBegin) + step);
    if (format.name() != "zarr") add("metadata.json", std::string(kMetadataBegin) + step + "}");
    return index;
  }
  bool has_fixed_names() const override { return true; }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    return base_->index_files(names);
  }
  std::optional<Value> parse_common(const DirectoryFiles& files) const override {
    return base_->parse_common(files);
  }
  Items wanted_items(const StateDict& wanted, const Metadata& metadata) const override {
    return base_->wanted_items(wanted, metadata);
  }
  StateDict from_items(const StateDict& wanted, const Items& loaded) const override {
    return base_->from_items(wanted, loaded);
  }

 private:
  std::shared_ptr<const Dialect> base_ = pytorch_dialect();
};

// The number behind `begin` in a file; 0: no such file, -1: it is another one of that name.
int64_t step_in(Storage& storage, const std::string& name, std::string_view begin) {
  if (!storage.stat(name)) return 0;
  const Bytes bytes = read_file(storage, name, 1000);
  const std::string text(as_text(bytes));
  return text.starts_with(begin) ? std::stoll(text.substr(begin.size())) : -1;
}

}  // namespace

std::shared_ptr<const Dialect> fixed_names_dialect() { return std::make_shared<FixedNames>(); }

int64_t step_of_fixed_names(Storage& storage) {
  const int64_t common = step_in(storage, "common.pt", kCommonBegin);
  const int64_t metadata = step_in(storage, "metadata.json", kMetadataBegin);
  EXPECT_TRUE(metadata < 0 || metadata == common) << "a mixture of two saves";
  return common;
}

}  // namespace tilestone
