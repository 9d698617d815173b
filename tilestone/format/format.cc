#include "tilestone/format/format.h"

namespace tilestone {

std::optional<std::string> Format::own_file(const TensorItem&, const Piece&) const {
  return std::nullopt;
}

std::optional<std::string> Format::own_file(const ObjectItem&) const { return std::nullopt; }

std::vector<std::string> Format::sized_files(std::span<const std::string>) const { return {}; }

std::vector<std::string> Format::rank_local_files(std::span<const std::string>) const { return {}; }

}  // namespace tilestone
