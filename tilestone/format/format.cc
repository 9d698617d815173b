#include "tilestone/format/format.h"

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void fail_without_rank_local(const Format& format) {
  throw Error(ErrorCode::kUnsupported,
              "the format " + std::string(format.name()) + " has no rank-local checkpoints");
}

}  // namespace

std::optional<std::string> Format::separate_file(const TensorItem&, const Piece&) const {
  return std::nullopt;
}

std::optional<std::string> Format::separate_file(const ObjectItem&) const { return std::nullopt; }

size_t Format::longest_name(const TensorItem&) const { return 0; }
size_t Format::longest_name(const ObjectItem&) const { return 0; }

std::vector<std::string> Format::sized_files(std::span<const std::string>) const { return {}; }

std::vector<std::string> Format::self_describing_files(std::span<const std::string>) const {
  return {};
}

std::optional<ProbeRange> Format::next_part(const std::string&, const FileParts&) const {
  return std::nullopt;
}

std::vector<std::string> Format::rank_local_files(std::span<const std::string>) const { return {}; }

std::string Format::rank_index_name(int) const { return ""; }

Bytes Format::encode_rank_index(const Metadata&) const { fail_without_rank_local(*this); }

Metadata Format::parse_rank_index(const DirectoryFiles&, int) const {
  fail_without_rank_local(*this);
}

}  // namespace tilestone
