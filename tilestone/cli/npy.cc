#include "tilestone/cli/npy.h"

#include <fmt/format.h>

#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/cli/output.h"

namespace tilestone::cli {
namespace {

std::string header(const TensorView& tensor) {
  std::string shape;
  for (const int64_t dim : tensor.shape) shape += fmt::format("{}, ", dim);
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
                                 npy_descr(tensor.dtype), shape);
  // Magic (6 bytes), version (2) and length (2), then the text, padded so that the data begins at a
  // multiple of 64 bytes.
  constexpr size_t kBefore = 10;
  const size_t padded = (kBefore + text.size() + 1 + 63) / 64 * 64;
  text.resize(padded - kBefore - 1, ' ');
  text += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(text.size() & 0xFF);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

}  // namespace

bool npy_has(DType dtype) { return npy_descr(dtype)[1] != 'V'; }

std::string npy_descr(DType dtype) {
  const uint64_t size = itemsize(dtype);
  for (const std::string_view kind : {"uint", "int", "float", "complex"}) {
    if (to_string(dtype) != fmt::format("{}{}", kind, 8 * size)) continue;
    if (dtype != DType::kComplex32)
      return fmt::format("{}{}{}", size == 1 ? '|' : '<', kind[0], size);
  }
  return dtype == DType::kBool ? "|b1" : fmt::format("|V{}", size);
}

void write_npy(const std::string& path, const TensorView& tensor) {
  write_file(path, {header(tensor), as_text({tensor.data, tensor.bytes()})});
}

}  // namespace tilestone::cli
