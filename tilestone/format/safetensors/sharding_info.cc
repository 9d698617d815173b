#include "tilestone/format/safetensors/sharding_info_internal.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/safetensors/header_internal.h"

namespace tilestone::safetensors {
namespace {

using Json = nlohmann::json;

[[noreturn]] void corrupt_info(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt,
              "safetensors header: " + std::string(kShardingInfoKey) + ": " + problem);
}

class InfoReader final : public nlohmann::json_sax<Json> {
 public:
  SafetensorsPieces take() && { return std::move(info_); }

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a bool"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { unexpected("a float"); }
  bool string(string_t&) override { unexpected("a string"); }
  bool binary(binary_t&) override { unexpected("bytes"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (!in_list_ || value > INT64_MAX || list_->size() == kMaxDims) unexpected("a number");
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }
  bool start_object(std::size_t) override {
    if (in_list_ || ++depth_ > 2) unexpected("an object");
    return true;
  }
  bool end_object() override {
    if (depth_-- == 2 && !has_offsets_) unexpected("no \"saved_offsets\"");
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 2) {
      const bool is_whole = name == kWholeField && !at_->second.whole;
      if (!is_whole && (name != kOffsetsField || has_offsets_)) {
        unexpected("the field " + in_quotes(name));
      }
      has_offsets_ = has_offsets_ || !is_whole;
      list_ = is_whole ? &at_->second.whole.emplace() : &at_->second.at;
      return true;
    }
    const auto [at, is_new] = info_.emplace(std::move(name), SafetensorsPiece());
    at_ = at;
    has_offsets_ = false;
    if (!is_new) unexpected("a second entry");
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_list_) unexpected("a list");
    in_list_ = true;
    return true;
  }
  bool end_array() override {
    in_list_ = false;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    corrupt_info("invalid JSON at byte " + std::to_string(position));
  }

 private:
  [[noreturn]] void unexpected(const std::string& what) const {
    corrupt_info(what + (info_.empty() ? "" : " at the tensor " + in_quotes(at_->first)));
  }

  SafetensorsPieces info_;
  SafetensorsPieces::iterator at_ = info_.end();  // the latest entry
  Dims* list_ = nullptr;                          // the latest list of it
  int depth_ = 0;
  bool has_offsets_ = false;
  bool in_list_ = false;
};

}  // namespace

SafetensorsPieces parse_sharding_info(std::string_view text) {
  if (text.empty()) return {};
  if (text.find('\0') != std::string_view::npos) corrupt_info("invalid JSON: a NUL byte");
  InfoReader reader;
  Json::sax_parse(text.begin(), text.end(), &reader);
  return std::move(reader).take();
}

}  // namespace tilestone::safetensors
