#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/file_name.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace tilestone::safetensors {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxText = size_t{256} << 20;  // bytes
constexpr int kMaxNesting = 64;                 // of "metadata", which is ignored

[[noreturn]] void corrupt_index(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "index of safetensors files: " + problem);
}

// Keeps only "weight_map". Everything else may have any content.
class MapReader final : public nlohmann::json_sax<Json> {
 public:
  WeightMap take() && {
    if (!found_) corrupt_index("\"weight_map\" is missing");
    return std::move(map_);
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a bool"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("bytes"); }
  bool string(string_t& text) override {
    if (!in_map_ || depth_ != 2) return value("a string");
    if (!map_.emplace(key_, text).second)
      corrupt_index("the key " + in_quotes(key_) + " occurs twice");
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ == 1 && key_ == "weight_map") {
      if (found_) corrupt_index("\"weight_map\" occurs twice");
      found_ = in_map_ = true;
      return deeper();
    }
    value("an object", depth_ == 0);
    return deeper();
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    value("a list");
    return deeper();
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ <= 2) key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    corrupt_index("invalid JSON at byte " + std::to_string(position));
  }

 private:
  bool deeper() {
    if (++depth_ > kMaxNesting) {
      corrupt_index("it is nested deeper than " + std::to_string(kMaxNesting) + " levels");
    }
    return true;
  }
  bool value(const std::string& what, bool expected = false) const {
    if (depth_ == 0 && !expected) corrupt_index("it is not a JSON object");
    if (in_map_ || (depth_ == 1 && key_ == "weight_map")) {
      corrupt_index(what + " in \"weight_map\" at " + in_quotes(key_));
    }
    return true;
  }

  WeightMap map_;
  std::string key_;
  int depth_ = 0;
  bool found_ = false;
  bool in_map_ = false;
};

}  // namespace

WeightMap parse_weight_map(ByteView text, const std::string& file) {
  try {
    if (text.size() > kMaxText) {
      corrupt_index("it has " + std::to_string(text.size()) + " bytes; the limit is " +
                    std::to_string(kMaxText));
    }
    MapReader reader;
    const std::string_view chars = as_text(text);
    // The parser takes it for the end of the text.
    if (chars.find('\0') != std::string_view::npos) corrupt_index("invalid JSON: a NUL byte");
    Json::sax_parse(chars.begin(), chars.end(), &reader);
    WeightMap map = std::move(reader).take();
    for (const auto& [key, name] : map) {
      check_file_name(name);
      if (name.find('/') == std::string::npos && name.ends_with(kFileSuffix)) continue;
      throw Error(ErrorCode::kUnsupported, "index of safetensors files: the tensor is in " +
                                               in_quotes(name) +
                                               ", which is not a safetensors file beside the index")
          .with_key(key);
    }
    return map;
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

void expect_index_fits(const WeightMap& map) {
  uint64_t bytes = 128;
  for (const auto& [key, name] : map) bytes += Json(key).dump().size() + name.size() + 10;
  if (bytes <= kMaxText) return;
  throw Error(ErrorCode::kInvalidArgument, "the index of the safetensors files would have " +
                                               std::to_string(bytes) + " bytes; the limit is " +
                                               std::to_string(kMaxText))
      .with_hint("convert a part of the keys (`--keys`), or give them shorter names (`--rename`)");
}

Bytes write_weight_map(const WeightMap& map, uint64_t bytes) {
  Json files = Json::object();
  for (const auto& [key, name] : map) files[key] = name;
  const Json json = {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(files)}};
  return to_bytes(json.dump(2) + "\n");
}

}  // namespace tilestone::safetensors
